"""Compaction: what attention sees after it, when it comes, and what a truncate makes of it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cache.allocations.uniform import Uniform
from engine.cache.paged import PagedCache
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from engine.request import Sequence
from tests.cache.harness import SHAPE, catch_up, make_cache, make_seq, qkv, step
from tests.cache.scripted import Ragged

Kept = list[list[list[int]]]

POLICIES = [SinksRecent(), SnapKV(), SnapKV(queries=12)]
ALLOCATIONS = [Uniform(), Ragged(by=6)]


def spec_of(policy: SinksRecent | SnapKV, allocation: Uniform | Ragged) -> KVSpec:
    return KVSpec(policy=policy, budget_tokens=24, window=10, allocation=allocation)


def kept(cache: PagedCache, slot: int) -> Kept:
    return [[p.tolist() for p in cache.positions(slot, n)] for n in range(SHAPE.layers)]


def masked(seq: Sequence, pos: int, seen: Kept) -> Tensor:
    """What the token at `pos` attends to with only the cells `seen`, [L, Hq, D]."""
    layers = []
    for layer in range(SHAPE.layers):
        q, k, v = qkv(seq, 0, pos + 1, layer)
        heads = []
        for head in range(SHAPE.q_heads):
            cells = seen[layer][head // SHAPE.group]
            keys, values = k[cells, head // SHAPE.group], v[cells, head // SHAPE.group]
            heads.append((keys @ q[-1, head] * SHAPE.head_dim**-0.5).softmax(-1) @ values)
        layers.append(torch.stack(heads))
    return torch.stack(layers)


def replay(cache: PagedCache, seq: Sequence, slot: int, chunk: int) -> list[Kept]:
    """Catch up; what was held after every chunk that ended at a compaction."""
    seen = []
    while (left := len(seq.tokens) - cache.computed(slot)) > 0:
        count = cache.reserve(seq, slot, min(left, chunk))
        step(cache, [(seq, slot, count)])
        before = cache.stats().evicted_cells
        cache.compress([slot])
        if cache.stats().evicted_cells > before:
            seen.append(kept(cache, slot))
    return seen


def admit(cache: PagedCache, seq: Sequence) -> int:
    admitted = cache.admit(seq)
    assert admitted is not None
    return admitted.slot


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_attention_sees_the_surviving_cells(
    policy: SinksRecent | SnapKV, allocation: Uniform | Ragged
) -> None:
    cache = make_cache(spec_of(policy, allocation))
    seq = make_seq(range(70), 50, max_tokens=20)
    slot = admit(cache, seq)
    short = make_seq(seq.tokens[:50], max_tokens=20)
    catch_up(cache, short, slot)
    for pos in range(50, 70):
        seen = [[[*cells, pos] for cells in heads] for heads in kept(cache, slot)]
        assert cache.reserve(seq, slot, 1) == 1
        (out,) = step(cache, [(seq, slot, 1)])
        torch.testing.assert_close(out[:, 0], masked(seq, pos, seen), atol=1e-5, rtol=1e-5)
        cache.compress([slot])


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_chunks_and_company_change_nothing(
    policy: SinksRecent | SnapKV, allocation: Uniform | Ragged
) -> None:
    spec = spec_of(policy, allocation)
    seq = make_seq(range(90), 45, max_tokens=45)
    results = []
    for chunk in (1, 13, 90):
        cache = make_cache(spec)
        results.append(replay(cache, seq, admit(cache, seq), chunk))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) >= 4
    cache = make_cache(spec, pages=128)
    seqs = [seq, make_seq(range(5, 68), 63), make_seq(range(9, 60), 30)]
    slots = [admit(cache, s) for s in seqs]
    while rows := [
        (s, slot, cache.reserve(s, slot, min(left, 11)))
        for s, slot in zip(seqs, slots, strict=True)
        if (left := len(s.tokens) - cache.computed(slot)) > 0
    ]:
        step(cache, rows)
        cache.compress(slots)
    alone = make_cache(spec)
    for s, slot in zip(seqs, slots, strict=True):
        single = admit(alone, s)
        catch_up(alone, s, single)
        assert kept(alone, single) == kept(cache, slot)
        alone.release(single)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_truncate_then_replay_equals_a_fresh_catch_up(
    policy: SinksRecent | SnapKV, allocation: Uniform | Ragged
) -> None:
    spec = spec_of(policy, allocation)
    original = make_seq(range(95), 45, max_tokens=60)
    for pos in (94, 88, 85, 84, 60, 46):
        cache = make_cache(spec)
        slot = admit(cache, original)
        catch_up(cache, original, slot)
        seq = make_seq([*range(pos), *range(100, 125)][:110], 45, max_tokens=65)
        computed = cache.truncate(slot, pos)
        assert computed in (0, pos)
        cache.check()
        again = catch_up(cache, seq, slot, 7)
        fresh = make_cache(spec)
        other = admit(fresh, seq)
        expected = catch_up(fresh, seq, other)
        torch.testing.assert_close(again, expected[:, computed:], atol=1e-5, rtol=1e-5)
        assert kept(cache, slot) == kept(fresh, other)


def test_before_a_compaction_the_slot_is_emptied() -> None:
    cache = make_cache(KVSpec(policy=SinksRecent(), budget_tokens=16, window=8))
    seq = make_seq(range(30), 10, max_tokens=20)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)  # compacted at 24
    assert cache.truncate(slot, 24) == 24
    assert cache.truncate(slot, 23) == 0
    assert cache.stats().used_pages == 0
    assert cache.held(slot).sum() == 0


def test_a_prompt_is_compacted_at_its_end_and_then_by_the_window() -> None:
    cache = make_cache(KVSpec(policy=SnapKV(queries=4), budget_tokens=24, window=10))
    seq = make_seq(range(80), 50, max_tokens=30)
    slot = admit(cache, seq)
    assert cache.reserve(seq, slot, 80) == 50, "the prompt whole, and nothing across its end"
    step(cache, [(seq, slot, 50)])
    cache.compress([slot])
    assert (cache.held(slot) == 24).all()
    assert cache.reserve(seq, slot, 30) == 10
    step(cache, [(seq, slot, 10)])
    assert (cache.held(slot) == 34).all()
    cache.compress([slot])
    assert (cache.held(slot) == 24).all()


def test_ragged_heads_hold_what_they_were_given_and_free_the_rest() -> None:
    spec = KVSpec(policy=SinksRecent(), budget_tokens=32, window=16, allocation=Ragged(by=16))
    cache = make_cache(spec)
    seq = make_seq(range(48), 48, max_tokens=8)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    # Layers have 48 and 16, their heads 16 more or less; nobody holds more than there was.
    assert cache.held(slot).tolist() == [[48, 32], [32, 0]]
    assert cache.stats().used_pages == 3 + 2 + 2
    cache.check()


def test_a_shared_page_is_left_as_it_is() -> None:
    spec = KVSpec(policy=SinksRecent(), budget_tokens=16, window=16)
    cache = make_cache(spec)
    seq = make_seq(range(31), 20, max_tokens=20)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    child = make_seq([*range(31), 90], 20, max_tokens=20)
    fork = cache.fork(slot, child)
    assert fork is not None
    catch_up(cache, child, fork)  # compacted at 32
    assert (cache.held(fork) == 16).all()
    assert kept(cache, slot) == [[list(range(31))] * 2] * 2
    out = step_one(cache, seq, slot)
    torch.testing.assert_close(out, masked(seq, 31, [[list(range(32))] * 2] * 2))
    cache.check()


def step_one(cache: PagedCache, seq: Sequence, slot: int) -> Tensor:
    seq.tokens.append(70)
    assert cache.reserve(seq, slot, 1) == 1
    (out,) = step(cache, [(seq, slot, 1)])
    return out[:, 0]


def test_queries_are_remembered_only_before_a_compaction() -> None:
    cache = make_cache(KVSpec(policy=SnapKV(queries=4), budget_tokens=24, window=10))
    seq = make_seq(range(80), 50, max_tokens=30)
    slot = admit(cache, seq)
    ring = cache._ring
    assert ring is not None
    for until, remembered in ((46, []), (48, [46, 47]), (50, [46, 47, 48, 49]), (56, None)):
        cache.reserve(seq, slot, until - cache.computed(slot))
        step(cache, [(seq, slot, until - cache.computed(slot))])
        cache.compress([slot])
        pos = ring.read(np.array([0]), slot)[1][0]
        assert pos[pos >= 0].tolist() == (
            remembered if remembered is not None else [46, 47, 48, 49]
        )
    cache.reserve(seq, slot, 3)
    step(cache, [(seq, slot, 3)])
    assert ring.read(np.array([0]), slot)[1][0].tolist() == [47, 56, 57, 58]
    cache.truncate(slot, 57)
    assert ring.read(np.array([0]), slot)[1][0].tolist() == [-1, -1, 47, 56]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_child_forked_just_before_its_parents_compaction_is_compacted_too(
    policy: SinksRecent | SnapKV,
) -> None:
    cache = make_cache(spec_of(policy, Uniform()))
    seq = make_seq(range(34), 20, max_tokens=40)
    slot = admit(cache, seq)
    assert cache.reserve(seq, slot, 34) == 34
    step(cache, [(seq, slot, 34)])  # the scheduler forks before the executor compacts
    child = make_seq([*range(34), 90], 20, max_tokens=40)
    fork = cache.fork(slot, child)
    assert fork is not None
    cache.compress([slot])
    assert cache.reserve(child, fork, 1) == 1
    assert kept(cache, slot) == kept(cache, fork)
    cache.check()


def test_a_child_has_its_parents_queries() -> None:
    spec = KVSpec(policy=SnapKV(queries=12), budget_tokens=24, window=10)
    cache = make_cache(spec)
    seq = make_seq(range(30), 20, max_tokens=40)  # compacted at 34: queries from 22 on are kept
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    child = make_seq([*range(30), *range(60, 70)], 20, max_tokens=40)
    fork = cache.fork(slot, child)
    assert fork is not None
    catch_up(cache, child, fork)
    fresh = make_cache(spec)
    other = admit(fresh, child)
    catch_up(fresh, child, other)
    assert cache.stats().evicted_cells > 0
    assert kept(cache, fork) == kept(fresh, other)
