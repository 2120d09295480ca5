"""The full cache: what it attends to, and where its pages go."""

import torch

from engine.cache.paged import PagedCache
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policy import KVSpec
from engine.request import Sequence
from engine.scheduler.controller import Capacity
from tests.cache.harness import SHAPE, catch_up, dense, make_cache, make_seq, step


def admit(cache: PagedCache, seq: Sequence, spare: int = 0) -> int:
    admitted = cache.admit(seq, spare)
    assert admitted is not None
    return admitted.slot


def test_the_scheduler_sees_a_capacity() -> None:
    cache = make_cache()
    capacity: Capacity = cache  # the type checker's test
    assert capacity.refuses(1, None) is None


def test_chunks_and_decode_attend_like_a_dense_cache() -> None:
    seq = make_seq(range(50))
    for chunk in (1, 7, 16, 50):
        cache = make_cache()
        slot = admit(cache, seq)
        out = catch_up(cache, seq, slot, chunk)
        torch.testing.assert_close(out, dense(seq), atol=1e-5, rtol=1e-5)
        cache.check()
        cache.release(slot)
        cache.check()
        assert cache.stats().used_pages == 0


def test_mixed_rows_in_any_order() -> None:
    cache = make_cache()
    seqs = [make_seq(range(i, i + 20)) for i in (0, 30, 60)]
    slots = [admit(cache, seq) for seq in seqs]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for counts in ((5, 1, 9), (1, 18, 1), (14, 1, 10)):
        rows = list(zip(seqs, slots, counts, strict=True))
        for seq, slot, count in rows:
            assert cache.reserve(seq, slot, count) == count
        for part, out in zip(parts, step(cache, rows), strict=True):
            part.append(out)
        cache.check()
    for seq, part in zip(seqs, parts, strict=True):
        torch.testing.assert_close(torch.cat(part, 1), dense(seq), atol=1e-5, rtol=1e-5)


def test_a_fork_shares_pages_until_one_of_them_writes() -> None:
    cache = make_cache()
    seq = make_seq(range(20))
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    before = cache.stats().used_pages
    child = make_seq([*range(20), 90, 91], 20)
    fork = cache.fork(slot, child)
    assert fork is not None
    assert cache.stats().used_pages == before
    seq.tokens += [80, 81]
    for mine, at in ((child, fork), (seq, slot)):
        out = catch_up(cache, mine, at)
        torch.testing.assert_close(out, dense(mine)[:, 20:], atol=1e-5, rtol=1e-5)
        cache.check()
    heads = SHAPE.layers * SHAPE.kv_heads
    assert cache.stats().used_pages == before + heads  # one copied the tail page, one kept it
    cache.release(slot)
    cache.check()
    assert cache.stats().used_pages == before
    cache.release(fork)
    assert cache.stats().used_pages == 0


def test_truncated_cells_are_replaced() -> None:
    cache = make_cache()
    seq = make_seq(range(40), 8)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)
    used = cache.stats().used_pages
    seq.tokens[18:] = range(60, 70)
    assert cache.truncate(slot, 18) == 18
    assert cache.stats().used_pages < used
    torch.testing.assert_close(catch_up(cache, seq, slot), dense(seq)[:, 18:], atol=1e-5, rtol=1e-5)
    assert cache.truncate(slot, 99) == len(seq.tokens)


def test_a_prompt_that_never_fits_is_refused_with_the_numbers() -> None:
    cache = make_cache(pages=16, max_len=100)
    assert cache.refuses(63) is None
    assert cache.refuses(64) == (
        "64 prompt tokens and one more need 20 pages of KV cache (21760 bytes);"
        " it has 16 (17408 bytes)"
    )
    assert make_cache(pages=99, max_len=64).refuses(64) == (
        "64 prompt tokens and one more exceed max_model_len=64"
    )
    bounded = KVSpec(policy=SinksRecent(), budget_tokens=32, window=16)
    assert make_cache(bounded, pages=12).refuses(100) is None
    assert make_cache(bounded, pages=11).refuses(100) is not None


def test_whatever_is_not_refused_is_admitted_alone_and_runs_to_the_last_page() -> None:
    cache = make_cache(pages=16)
    seq = make_seq(range(63), max_tokens=100)
    slot = admit(cache, seq, spare=3)
    catch_up(cache, seq, slot)
    seq.tokens.append(63)
    assert cache.reserve(seq, slot, 1) == 1
    step(cache, [(seq, slot, 1)])
    seq.tokens.append(64)
    assert cache.reserve(seq, slot, 1) == 0
    cache.check()


def test_a_growing_slot_leaves_what_others_were_promised() -> None:
    cache = make_cache(pages=20)
    first, second = make_seq(range(16), max_tokens=99), make_seq(range(50, 66), max_tokens=99)
    slots = [admit(cache, seq) for seq in (first, second)]  # promised 2 pages a head
    first.tokens += range(48)
    assert cache.reserve(first, slots[0], 64) == 48  # 3 a head: 8 of 20 are the other's
    cache.check()
    cache.release(slots[1])
    assert cache.reserve(first, slots[0], 64) == 64


def test_smaller_budgets_let_more_sequences_in() -> None:
    def admitted(spec: KVSpec) -> int:
        cache = make_cache(spec, pages=64, slots=16)
        count = 0
        while cache.admit(make_seq(range(40), max_tokens=80)) is not None:
            count += 1
        return count

    policy = SinksRecent()
    assert admitted(KVSpec(policy=policy, budget_tokens=64, window=16)) == 64 // (4 * 6)
    assert admitted(KVSpec(policy=policy, budget_tokens=16, window=16)) == 64 // (4 * 3)


def test_spare_room_is_borrowed_given_back_and_inherited() -> None:
    spec = KVSpec(policy=SinksRecent(), budget_tokens=16, window=16)  # a slot: 4 heads * 3 pages
    cache = make_cache(spec, pages=36, slots=8)
    seq = make_seq(range(8))
    slot = admit(cache, seq, spare=1)
    other = admit(cache, make_seq(range(8)))
    assert cache.admit(make_seq(range(8))) is None

    def branch(parent: int) -> int | None:
        child = make_seq(range(8))
        child.parent = seq
        return cache.fork(parent, child)

    child = branch(slot)
    assert child is not None
    assert branch(slot) is None
    cache.release(child)
    child = branch(slot)  # given back, so there's room again
    assert child is not None
    cache.release(slot)  # adopted: the child goes on, with a room for its own children
    assert cache.admit(make_seq(range(8))) is None
    assert branch(child) is not None
    cache.release(other)
    assert cache.fork(child, make_seq(range(8))) is not None  # another choice brings its own room
    cache.check()


def test_low_precision_cells() -> None:
    cache = make_cache(KVSpec(format="bf16"))
    seq = make_seq(range(40))
    out = catch_up(cache, seq, admit(cache, seq), 7)
    torch.testing.assert_close(out, dense(seq), atol=3e-2, rtol=3e-2)
    assert cache.stats().page_bytes == 16 * (2 * 8 * 2 + 4)


def test_forks_that_copy_their_last_pages_take_no_more_than_there_is() -> None:
    cache = make_cache(pages=24)
    seq = make_seq(range(17), max_tokens=99)
    slot = admit(cache, seq)
    catch_up(cache, seq, slot)  # 2 pages a head: 8
    children = [make_seq([*range(17), 90 + i], 17, max_tokens=99) for i in range(4)]
    forks = [at for child in children if (at := cache.fork(slot, child)) is not None]
    assert len(forks) == 3  # of 16 free pages, 4 stay promised to each, and there are 4 slots
    granted = [cache.reserve(child, fork, 40) for child, fork in zip(children, forks, strict=False)]
    assert all(granted), "room to copy is part of the promise"
    assert cache.stats().free_pages >= 0
    cache.check()
