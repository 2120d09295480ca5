"""A compaction in pieces, over several steps, ends as one in one go; and it keeps to its time."""

import itertools
import time
from typing import Any

import pytest

from engine.cache.allocations.uniform import Uniform
from engine.cache.paged import PagedCache
from engine.cache.policy import KVSpec
from engine.cache.view import Compaction
from engine.request import Sequence
from tests.cache.harness import SHAPE, make_cache, make_seq
from tests.cache.scripted import Ragged, Scripted, read_biases, read_labels, run_labelled

LAYERS = SHAPE._replace(layers=4)


def spec_of(at_once: int, ragged: bool = False, form: str = "auto") -> KVSpec:
    policy = Scripted(skip=2, tail=3, bias=True)
    object.__setattr__(policy, "cells_at_once", at_once)
    return KVSpec(
        policy=policy,
        budget_tokens=24,
        window=10,
        allocation=Ragged(by=6) if ragged else Uniform(),
        format=form,  # type: ignore[arg-type]
        tail_tokens=0,
    )


def catch_up(cache: PagedCache, seq: Sequence, slot: int, compress: bool = True) -> None:
    while (left := len(seq.tokens) - cache.computed(slot)) > 0:
        count = cache.reserve(seq, slot, left)
        run_labelled(cache, [(seq.tokens, slot, cache.computed(slot), count)])
        if compress:
            cache.compress([slot])


def started(spec: KVSpec, tokens: int = 34) -> tuple[PagedCache, Sequence, int]:
    """A cache with a slot whose compaction is due."""
    cache = make_cache(spec, shape=LAYERS, pages=256, packed_pages=256, max_len=240)
    seq = make_seq(range(tokens), 20, max_tokens=60)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot, compress=False)
    return cache, seq, slot


def held(cache: PagedCache, slot: int) -> list[list[list[int]]]:
    return [[p.tolist() for p in cache.positions(slot, n)] for n in range(LAYERS.layers)]


@pytest.mark.parametrize("form", ["auto", "int8"])
@pytest.mark.parametrize("ragged", [False, True])
def test_layers_together_are_changed_as_each_would_be_alone(form: str, ragged: bool) -> None:
    found = []
    for at_once in (10_000, 1):
        cache = make_cache(
            spec_of(at_once, ragged, form), shape=LAYERS, pages=256, packed_pages=256, max_len=240
        )
        seq = make_seq(range(200), 50)
        slot = cache.admit(seq).slot  # type: ignore[union-attr]
        catch_up(cache, seq, slot)
        cache.check()
        found.append((read_labels(cache, slot), read_biases(cache, slot)))
    together, alone = found
    assert together == alone


def test_a_piece_a_call_ends_as_all_at_once() -> None:
    cache, _, slot = started(spec_of(1))
    whole, _, other = started(spec_of(1))
    beside = cache.admit(make_seq(range(5)))
    assert beside is not None
    whole.compress([other])
    assert not whole.busy(other)
    evicted: list[int] = []
    for _ in range(LAYERS.layers):
        assert cache.busy(slot) is bool(evicted)
        cache.compress([slot] if not evicted else [], 0.0)
        evicted.append(cache.stats().evicted_cells)
        cache.check()
    assert evicted == [20, 40, 60, 80]  # 10 of each of two heads
    assert not cache.busy(slot)
    assert held(cache, slot) == held(whole, other)
    assert cache.stats().used_pages == whole.stats().used_pages
    assert not cache.busy(beside.slot)


def test_a_call_stops_before_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, _, slot = started(spec_of(1))
    assert cache.admit(make_seq(range(5))) is not None
    clock = itertools.count(0.0, 1.0)  # every look costs a second, as a piece does
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    cache.compress([slot], 2.5)
    assert cache.stats().evicted_cells == 2 * 20
    cache.compress([slot], 2.5)
    assert cache.stats().evicted_cells == 4 * 20


def test_alone_nobody_is_held_up() -> None:
    cache, _, slot = started(spec_of(1))
    cache.compress([slot], 0.0)
    assert not cache.busy(slot)


def begun() -> tuple[PagedCache, Sequence, int]:
    """Two of four layers are compacted."""
    cache, seq, slot = started(spec_of(1))
    assert cache.admit(make_seq(range(5))) is not None
    for _ in range(2):
        cache.compress([slot], 0.0)
    assert cache.stats().evicted_cells == 40
    return cache, seq, slot


def test_the_rest_is_done_before_a_token_follows() -> None:
    cache, seq, slot = begun()
    whole, _, other = started(spec_of(1))
    whole.compress([other])
    seq.tokens.append(90)
    assert cache.reserve(seq, slot, 1) == 1
    assert held(cache, slot) == held(whole, other)


def test_a_child_is_of_a_compacted_parent() -> None:
    cache, seq, slot = begun()
    fork = cache.fork(slot, make_seq([*seq.tokens, 90], 20))
    assert fork is not None
    assert (cache.held(fork) == 24).all()
    assert held(cache, fork) == held(cache, slot)
    cache.check()


def test_going_back_empties_it() -> None:
    cache, seq, slot = begun()
    assert cache.truncate(slot, 33) == 0
    assert not cache.busy(slot)
    assert cache.held(slot).sum() == 0
    cache.check()
    catch_up(cache, seq, slot)
    assert (cache.held(slot) == 24).all()


def test_a_slot_that_went_is_forgotten() -> None:
    cache, seq, slot = begun()
    cache.release(slot)
    cache.check()
    again = cache.admit(seq)
    assert again is not None
    assert not cache.busy(again.slot)
    catch_up(cache, seq, again.slot)
    assert (cache.held(again.slot) == 24).all()


def test_a_policy_that_raises_fails_its_slot_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, seq, slot = started(spec_of(1))
    other = make_seq(range(34), 20, max_tokens=60)
    beside = cache.admit(other)
    assert beside is not None
    catch_up(cache, other, beside.slot, compress=False)
    compact, calls = Scripted.compact, itertools.count()

    def raises_once(*args: Any) -> Compaction:
        if next(calls) == 1:
            raise RuntimeError("broken")
        return compact(*args)

    monkeypatch.setattr(Scripted, "compact", raises_once)
    cache.compress([slot, beside.slot])
    caplog.clear()
    assert cache.failure(slot) == "its compaction failed: RuntimeError: broken"
    assert cache.failure(beside.slot) is None
    assert (cache.held(beside.slot) == 24).all()
    assert not cache.busy(slot)
    seq.tokens.append(90)
    assert cache.reserve(seq, slot, 1) == 1, "its row runs, and brings the error"
    cache.release(slot)
    cache.check()
    again = cache.admit(seq)
    assert again is not None
    assert cache.failure(again.slot) is None
