"""Kara: its scores and runs cell by cell, and what becomes of windows in a cache."""

import math
from typing import Any

import pytest
import torch

from engine.cache.allocations.adakv import AdaKV
from engine.cache.paged import PagedCache
from engine.cache.policies.kara import Kara, in_runs
from engine.cache.policy import KVSpec
from engine.cache.view import LayerView
from tests.cache.harness import SHAPE, catch_up, make_cache, make_seq
from tests.cache.views import GROUP, make_view

WINDOW, RECENT, BUDGET = 24, 6, 10


def window_view(slots: int = 2) -> LayerView:
    """One window's cells at positions 40 to 63, with its queries and those of 6 later tokens."""
    view = make_view(WINDOW + RECENT, [[WINDOW, WINDOW]] * slots)
    pos = torch.arange(40, 40 + WINDOW).expand(slots, 2, -1)
    query_pos = torch.arange(40, 40 + WINDOW + RECENT).expand(slots, -1)
    return view._replace(start=40, end=40 + WINDOW, pos=pos, query_pos=query_pos)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_scores_are_attention_within_the_window(bidirectional: bool) -> None:
    view = window_view()
    assert view.queries is not None
    got = Kara(recent=RECENT, bidirectional=bidirectional).utility(view, BUDGET)
    for slot in range(2):
        for head in range(2):
            expected = [0.0] * WINDOW
            for row in range(WINDOW):
                for q in view.queries[slot, row, head * GROUP : (head + 1) * GROUP]:
                    last = WINDOW if bidirectional else row + 1
                    logits = [float(q @ view.k[slot, head, i]) / math.sqrt(8) for i in range(last)]
                    for i, weight in enumerate(torch.tensor(logits).softmax(0).tolist()):
                        expected[i] += weight / (WINDOW * GROUP)
            torch.testing.assert_close(got[slot, head], torch.tensor(expected))


def runs_by_hand(scores: list[float], budget: int, grown: float, chunk: int) -> list[int]:
    """Seeds, then runs one after the other, then the best of the rest."""
    best = sorted(range(len(scores)), key=lambda i: (scores[i], i), reverse=True)
    median = sorted(scores)[(len(scores) - 1) // 2]
    seeds = best[: budget - int(grown * budget)]
    kept = list(seeds)
    for seed in seeds:
        run = [seed]
        while len(run) < chunk:
            near = [i for i in (min(run) - 1, max(run) + 1) if 0 <= i < len(scores)]
            better = max(near, key=lambda i: (scores[i], i))
            if scores[better] < median:
                break
            run.append(better)
        kept += [i for i in run if i not in kept]
    kept += [i for i in best if i not in kept]
    return sorted(kept[:budget])


@pytest.mark.parametrize("chunk", [1, 3, 8])
@pytest.mark.parametrize("grown", [0.0, 0.5, 1.0])
def test_runs_are_those_grown_one_after_the_other(chunk: int, grown: float) -> None:
    noise = torch.Generator().manual_seed(chunk)
    view = window_view(30)
    scores = torch.rand(30, 2, WINDOW, generator=noise)
    scores[:10] = (scores[:10] * 4).floor()  # ties
    budget = torch.randint(1, WINDOW, (30, 2), generator=noise)
    keep = Kara(chunk=chunk, grown=grown).compact(view, scores, budget).keep
    for slot in range(30):
        for head in range(2):
            cells, size = scores[slot, head].tolist(), int(budget[slot, head])
            expected = runs_by_hand(cells, size, grown, chunk)
            got = keep[slot, head]
            assert got[got >= 0].tolist() == expected


def test_without_growth_the_best_stay() -> None:
    scores = torch.tensor([[[0.1, 0.9, 0.2, 0.8, 0.7, 0.3]]])
    valid = torch.ones(1, 1, 6, dtype=torch.bool)
    assert in_runs(scores, valid, torch.tensor([[3]]), 1).argsort(-1)[0, 0].tolist() == [
        *[1, 3, 4, 5, 2, 0]
    ]


def cache_of(pages: int = 96, **fields: object) -> PagedCache:
    policy = Kara(recent=RECENT)
    spec = KVSpec(policy=policy, budget_tokens=BUDGET, window=WINDOW, **fields)  # type: ignore[arg-type]
    return make_cache(spec, pages=pages, max_len=200)


def test_each_window_is_compacted_once() -> None:
    cache, prompt = cache_of(), 21
    seq = make_seq(range(prompt), max_tokens=150)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    windows: list[list[list[int]]] = []  # [window][head of layer 1] positions that stayed
    for total in range(prompt + 1, 150):
        seq.tokens.append(total)
        catch_up(cache, seq, slot)
        cache.check()
        done = max(total - prompt - RECENT, 0) // WINDOW
        held = cache.held(slot)
        assert (held == total - done * (WINDOW - BUDGET)).all()
        assert held.max() <= Kara(recent=RECENT).peak(prompt, total, BUDGET, WINDOW)
        if done > len(windows):
            start = prompt + (done - 1) * WINDOW
            own = set(range(start, start + WINDOW))
            kept = [own & set(p.tolist()) for p in cache.positions(slot, 1)]
            windows.append([sorted(p) for p in kept])
            assert all(len(p) == BUDGET for p in kept)
        for head, pos in enumerate(cache.positions(slot, 1)):
            before = prompt + done * WINDOW
            settled = [p for p in pos.tolist() if prompt <= p < before]
            assert settled == [p for heads in windows for p in heads[head]], "never touched again"
            assert pos.tolist()[:prompt] == list(range(prompt))
            assert pos.tolist()[-(total - before) :] == list(range(before, total))
    assert len(windows) == 5


def test_heads_that_hold_different_cells_still_offer_the_same_window() -> None:
    cache = cache_of(allocation=AdaKV(safe=0.2))
    seq = make_seq(range(21), max_tokens=150)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    seq.tokens.extend(range(21, 140))
    catch_up(cache, seq, slot, 13)
    cache.check()
    done = (140 - 21 - RECENT) // WINDOW
    held = cache.held(slot)
    assert (held.sum(1) == 2 * (140 - done * (WINDOW - BUDGET))).all()
    assert held[0, 0] != held[0, 1]
    for layer in range(SHAPE.layers):
        for pos in cache.positions(slot, layer):
            assert pos.tolist()[:21] == list(range(21))
            newest = range(21 + done * WINDOW, 140)
            assert pos.tolist()[-len(newest) :] == list(newest)


def test_a_child_compacts_its_parents_window_for_itself() -> None:
    cache = cache_of()
    seq = make_seq(range(40), 21, max_tokens=150)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot)
    child = make_seq([*range(40), *range(100, 160)], 21, max_tokens=150)
    fork = cache.fork(slot, child)
    assert fork is not None
    catch_up(cache, child, fork)
    cache.check()
    fresh = cache_of()
    other = fresh.admit(child).slot  # type: ignore[union-attr]
    catch_up(fresh, child, other, 7)
    for layer in range(SHAPE.layers):
        both = (cache.positions(fork, layer), fresh.positions(other, layer))
        for mine, theirs in zip(*both, strict=True):
            assert mine.tolist() == theirs.tolist()
    assert (cache.held(slot) == 40).all()


def test_a_budget_that_keeps_all_is_refused() -> None:
    with pytest.raises(ValueError, match="a budget of 24 cells of each window of 24 keeps all"):
        KVSpec(policy=Kara(), budget_tokens=24, window=24)


@pytest.mark.parametrize("fields", [{"recent": -1}, {"chunk": 0}, {"grown": 1.5}])
def test_settings_that_cannot_work_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} must be"):
        Kara(**fields)
