"""Packed pages beside plain ones: what attention sees, and where the pages go."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.cache.paged import PagedCache
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from engine.cache.view import Compaction, LayerView
from engine.kernels.packed import BITS, PACK
from engine.request import Sequence
from tests.cache.harness import SHAPE, catch_up, dense, make_cache, make_seq, qkv, step
from tests.cache.scripted import Ragged, read_biases

TAIL = 20
HEADS = SHAPE.layers * SHAPE.kv_heads
SPECS = {
    "full": KVSpec(format="int4", tail_tokens=TAIL),
    "sinks-recent": KVSpec(
        format="int8", tail_tokens=TAIL, policy=SinksRecent(), budget_tokens=100, window=50
    ),
    "snapkv": KVSpec(format="int8", tail_tokens=0, policy=SnapKV(), budget_tokens=90, window=70),
    "ragged": KVSpec(
        format="int2",
        tail_tokens=TAIL,
        policy=SnapKV(),
        budget_tokens=100,
        window=30,
        allocation=Ragged(by=40),
    ),
}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def cache_of(spec: KVSpec, **sizes: int) -> PagedCache:
    given: dict[str, Any] = {"max_len": 400, "pages": 200, "packed_pages": 120} | sizes
    return make_cache(spec, **given)


def admit(cache: PagedCache, seq: Sequence, spare: int = 0) -> int:
    admitted = cache.admit(seq, spare)
    assert admitted is not None
    return admitted.slot


def contents(cache: PagedCache, slot: int, layer: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """k, v and positions of each head's cells, as the cache reads them."""
    where, _ = cache._parts.addresses(slot, layer)
    held = cache.held(slot)[layer]
    found = []
    for own, count in zip(where, held, strict=True):
        cells = cache._parts.read(own[:count])
        found.append((cells.k, cells.v, cells.pos))
    return found


def seen(cache: PagedCache, slot: int, seq: Sequence, pos: int) -> Tensor:
    """What the token at `pos`, whose cells are there, attends to, [L, Hq, D]: dense, over the
    values that the cells stand for."""
    layers = []
    for layer in range(SHAPE.layers):
        q = qkv(seq, pos, 1, layer)[0][0]
        cells, heads = contents(cache, slot, layer), []
        for head in range(SHAPE.q_heads):
            k, v, _ = cells[head // SHAPE.group]
            heads.append((k @ q[head] * SHAPE.head_dim**-0.5).softmax(-1) @ v)
        layers.append(torch.stack(heads))
    return torch.stack(layers)


@each_spec
def test_attention_sees_the_values_that_cells_stand_for(spec: KVSpec) -> None:
    cache = cache_of(spec)
    seq = make_seq(range(300), 150, max_tokens=150)
    slot = admit(cache, seq)
    catch_up(cache, make_seq(seq.tokens[:150], max_tokens=150), slot)
    for pos in range(150, 300):
        assert cache.reserve(seq, slot, 1) == 1
        (out,) = step(cache, [(seq, slot, 1)])
        torch.testing.assert_close(out[:, 0], seen(cache, slot, seq, pos), atol=1e-4, rtol=0)
        cache.compress([slot])
        cache.check()
    assert cache.stats().used_packed_pages > 0
    assert (cache._tables.length[slot] <= TAIL + 2 * PACK).all()


@pytest.mark.parametrize("bits", BITS)
def test_cells_are_the_formats_own_until_a_compaction(bits: int) -> None:
    cache = cache_of(KVSpec(format=f"int{bits}", tail_tokens=TAIL))  # type: ignore[arg-type]
    seq = make_seq(range(230))
    slot = admit(cache, seq)
    out = catch_up(cache, seq, slot, 100)
    store = cache._packed.store if cache._packed is not None else None
    assert store is not None
    for layer in range(SHAPE.layers):
        _, k, v = qkv(seq, 0, 230, layer)
        for head, (got_k, got_v, pos) in enumerate(contents(cache, slot, layer)):
            assert pos.tolist() == list(range(230))
            packed = (192 - TAIL) // PACK * PACK
            assert torch.equal(got_k[packed:], k[packed:, head])
            assert torch.equal(got_v[packed:], v[packed:, head])
            own = k[:packed, head].view(-1, PACK, SHAPE.head_dim)
            steps = (own.amax(1) - own.amin(1)) / (2**bits - 1)  # of a channel in a group
            error = (got_k[:packed].view_as(own) - own).abs()
            assert (error <= steps[:, None] * 0.51 + 3e-3).all()
            assert error.max() > 0
            spread = v[:packed, head].amax(-1) - v[:packed, head].amin(-1)
            error = (got_v[:packed] - v[:packed, head]).abs().amax(-1)
            assert (error <= spread / (2**bits - 1) * 0.51 + 3e-3).all()
    gap = (out - dense(seq)).abs().max()
    assert gap < {8: 0.05, 4: 0.6, 2: 3.0}[bits]


@each_spec
def test_chunks_and_company_change_nothing(spec: KVSpec) -> None:
    seq = make_seq(range(260), 130, max_tokens=130)
    outs = []
    for chunk in (1, 37, 260):
        cache = cache_of(spec)
        outs.append(catch_up(cache, seq, admit(cache, seq), chunk))
    torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[0], outs[2], atol=1e-5, rtol=1e-5)
    cache = cache_of(spec, pages=400, packed_pages=300)
    seqs = [seq, make_seq(range(5, 150), 140), make_seq(range(9, 60), 30)]
    slots = [admit(cache, s) for s in seqs]
    mine = []
    while rows := [
        (s, slot, cache.reserve(s, slot, min(left, 11)))
        for s, slot in zip(seqs, slots, strict=True)
        if (left := len(s.tokens) - cache.computed(slot)) > 0
    ]:
        found = step(cache, rows)
        if rows[0][0] is seq:
            mine.append(found[0])
        cache.compress(slots)
    torch.testing.assert_close(torch.cat(mine, 1), outs[0], atol=1e-5, rtol=1e-5)


@each_spec
def test_a_prefix_hit_gives_what_a_miss_gives(spec: KVSpec) -> None:
    prompt = list(range(200))
    for length in (200, 150, 137, 65):
        cache = cache_of(spec)
        first = make_seq(prompt, max_tokens=60)
        slot = admit(cache, first)
        catch_up(cache, first, slot, 50)
        cache.release(slot)
        cache.check()
        again = make_seq([*prompt[:length], *range(300, 360)], length, max_tokens=60)
        other = admit(cache, again)
        cached = cache.computed(other)
        assert cached > 0 or length == 65 or spec.queries
        cache.check()
        out = catch_up(cache, again, other, 50)
        fresh = cache_of(spec)
        expected = catch_up(fresh, again, admit(fresh, again), 50)
        torch.testing.assert_close(out, expected[:, cached:], atol=1e-5, rtol=1e-5)
        cache.check()


def test_a_fork_shares_packed_pages_for_ever() -> None:
    cache = cache_of(SPECS["full"])
    seq = make_seq(range(200))
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    before = cache.stats()
    child = make_seq([*range(200), *range(400, 470)], 200)
    fork = cache.fork(slot, child)
    assert fork is not None
    assert cache.stats().used_bytes == before.used_bytes
    catch_up(cache, child, fork)
    after = cache.stats()
    packed = (256 - TAIL) // PACK - (192 - TAIL) // PACK
    assert after.used_packed_pages == before.used_packed_pages + HEADS * packed
    cache.check()
    cache.release(slot)
    alone = cache_of(SPECS["full"])
    expected = catch_up(alone, child, admit(alone, child))
    child.tokens.append(1)
    assert cache.reserve(child, fork, 1) == 1
    step(cache, [(child, fork, 1)])
    assert expected.shape[1] == 270
    cache.release(fork)
    assert cache.stats().used_bytes == 0


def test_going_back_into_packed_cells_keeps_their_values() -> None:
    cache = cache_of(SPECS["full"])
    seq = make_seq(range(250), 10)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    for pos in (240, 150, 149, 130, 100, 64, 33, 3):
        before = [contents(cache, slot, layer) for layer in range(SHAPE.layers)]
        assert cache.truncate(slot, pos) == pos
        cache.check()
        for layer, heads in enumerate(before):
            for old, new in zip(heads, contents(cache, slot, layer), strict=True):
                assert all(torch.equal(a[:pos], b) for a, b in zip(old, new, strict=True))
        seq.tokens[pos:] = range(300, 300 + 140)
        catch_up(cache, seq, slot, 33)
        cache.check()
    cache.release(slot)
    assert cache.stats().used_bytes == 0


def test_pages_that_lose_cells_keep_their_codes() -> None:
    """Until too many are partly empty: then the last are packed anew, and few of the first."""
    spec = KVSpec(
        format="int4", tail_tokens=0, policy=SnapKV(queries=1), budget_tokens=300, window=64
    )
    cache = cache_of(spec)
    seq = make_seq(range(396), 380, max_tokens=16)
    slot = admit(cache, seq)
    catch_up(cache, make_seq(seq.tokens[:380], max_tokens=16), slot, 64)
    errors = []
    for layer in range(SHAPE.layers):
        _, k, _ = qkv(seq, 0, 380, layer)
        for head, (got, _, pos) in enumerate(contents(cache, slot, layer)):
            own = k[:, head].clone()
            for group in range(5):
                part = own[group * PACK : (group + 1) * PACK]
                span = (part.amax(0) - part.amin(0)) / 15
                error = (got - own[pos.long()]).abs()[(pos // PACK) == group]
                errors.append((error <= 0.51 * span + 3e-3).all(-1).float().mean())
    assert torch.stack(errors).view(-1, 5)[:, 0].min() == 1, "the first group was never packed anew"
    groups = cache._parts.packed.groups if cache._parts.packed else None
    assert groups is not None
    assert (groups.count(slot) <= -(-groups.cells(slot) // PACK) + 1).all()


def test_bytes_are_those_of_both_kinds() -> None:
    cache = cache_of(SPECS["full"])
    seq = make_seq(range(200))
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    stats = cache.stats()
    dim, groups = SHAPE.head_dim, (192 - TAIL) // PACK
    page = 64 * dim + 4 * dim + 64 * 4 + 64 * 4  # int4 keys and values, two kinds of grid, pos
    assert stats.packed_page_bytes == page
    plain = -(-(200 - groups * PACK) // 16)
    assert stats.used_bytes >= HEADS * (groups * page + plain * stats.page_bytes)
    assert stats.used_packed_pages == HEADS * groups
    assert stats.peak_bytes >= stats.used_bytes


def test_what_is_refused_names_the_pool() -> None:
    cache = cache_of(SPECS["full"], packed_pages=4)
    assert cache.refuses(140) is None
    reason = cache.refuses(390)
    assert reason is not None
    assert "packed pages of KV cache" in reason


@dataclass(frozen=True)
class Shifted(SinksRecent):
    """Every cell that stays gets other numbers."""

    bias = True

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        keep = super().compact(view, utility, budget).keep
        index = keep.clamp(min=0)[..., None].expand(*keep.shape, view.k.shape[-1])
        k, v = view.k.gather(2, index) + 1, view.v.gather(2, index) - 1
        return Compaction(keep, k, v, torch.ones_like(keep, dtype=torch.float32))


def test_rows_that_a_policy_replaces_are_packed_anew() -> None:
    spec = KVSpec(format="int8", tail_tokens=TAIL, policy=Shifted(), budget_tokens=150, window=50)
    cache = cache_of(spec)
    seq = make_seq(range(201), 200, max_tokens=60)
    slot = admit(cache, seq)
    while (left := 200 - cache.computed(slot)) > 0:
        step(cache, [(seq, slot, cache.reserve(seq, slot, left))])
        if cache.computed(slot) < 200:
            cache.compress([slot])
    before = [contents(cache, slot, layer) for layer in range(SHAPE.layers)]
    cache.compress([slot])
    cache.check()
    for layer, heads in enumerate(before):
        for old, new in zip(heads, contents(cache, slot, layer), strict=True):
            kept = new[2].long()
            assert len(kept) == 150
            torch.testing.assert_close(new[0], old[0][kept] + 1, atol=0.03, rtol=0)
            torch.testing.assert_close(new[1], old[1][kept] - 1, atol=0.03, rtol=0)
    assert {b for heads in read_biases(cache, slot) for bs in heads for b in bs} == {1.0}
    assert cache.stats().used_packed_pages > 0
