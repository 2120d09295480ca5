"""Attention matching: its solvers against plain definitions, and what its fits are for."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.cache.matching import (
    MOST,
    MatchingPolicy,
    bounded_least_squares,
    fit_factors,
    norm_bound,
    reference_weights,
)
from engine.cache.policies.am import AM
from engine.cache.policies.tam import TAM, largest_remainder, merged, rank_within, thoughts_of
from engine.cache.policy import KVSpec
from engine.cache.view import Compaction, LayerView
from tests.cache.test_policies import view_for
from tests.conftest import MakeEngine
from tests.engines import greedy, prompts, run_all

POLICIES: list[MatchingPolicy] = [AM(), AM(score="max"), TAM(), TAM(pivotal=1.5, shortest=8)]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=repr)


def outputs(weights: Tensor, v: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True) @ v.double()


def errors(view: LayerView, done: Compaction) -> tuple[Tensor, Tensor]:
    """Each head's mean square error of the attention output [S, H], of the cells kept with their
    new biases and values, and of the same cells as they were."""
    at = done.keep.clamp(min=0)
    held = done.keep >= 0
    full = reference_weights(view, view.valid).double()
    wanted = outputs(full, view.v)
    own = full.gather(-1, at[:, :, None].expand(-1, -1, full.shape[2], -1)) * held[:, :, None]
    v = view.v.gather(2, at[..., None].expand(-1, -1, -1, view.v.shape[-1]))
    assert view.bias is not None
    assert done.bias is not None
    assert done.v is not None
    factor = (done.bias - view.bias.gather(-1, at)).exp().double()
    fitted = outputs(own * factor[:, :, None], done.v)
    return tuple(  # type: ignore[return-value]
        (got - wanted).square().mean((2, 3)) for got in (fitted, outputs(own, v))
    )


@each_policy
@pytest.mark.parametrize("size", [17, 32, 64])
def test_the_fit_is_nearer_to_the_full_attention(policy: MatchingPolicy, size: int) -> None:
    view = view_for(policy, [[90, 75], [88, 80]])
    budget = torch.full((2, 2), size)
    done = policy.compact(view, policy.utility(view, size), budget)
    fitted, unbiased = errors(view, done)
    assert (fitted < 0.8 * unbiased).all()
    assert done.bias is not None
    assert done.bias.isfinite().all()


@each_policy
def test_what_was_fitted_can_be_fitted_again(policy: MatchingPolicy) -> None:
    """A cell's bias is part of its logits: as if it stood for that many cells."""
    view = view_for(policy, [[60, 60]])
    assert view.bias is not None
    twice = view._replace(bias=torch.full_like(view.bias, 0.7))
    shifted = view._replace(bias=torch.zeros_like(view.bias))
    first, other = (
        policy.compact(each, policy.utility(each, 24), torch.tensor([[24, 24]]))
        for each in (twice, shifted)
    )
    assert first.keep.tolist() == other.keep.tolist()
    assert first.bias is not None
    assert other.bias is not None
    torch.testing.assert_close(first.bias, other.bias + 0.7, atol=1e-5, rtol=1e-5)


def test_pivots_and_tail_stay_as_they_are() -> None:
    policy = TAM(tail=6)
    view = view_for(policy, [[90, 75]])
    assert view.queries is not None
    assert view.bias is not None
    q, k = view.queries.clone(), view.k.clone()
    q[..., 0], k[0, :, 30] = 3.0, torch.tensor([9.0, *[0.0] * 7])  # looked at by all
    view = view._replace(k=k, queries=q)
    done = policy.compact(view, policy.utility(view, 24), torch.tensor([[24, 24]]))
    for head, cells in enumerate((90, 75)):
        kept = done.keep[0, head]
        assert 30 in kept
        assert set(range(cells - 6, cells)) <= set(kept.tolist())
        same = [i for i, cell in enumerate(kept.tolist()) if cell == 30 or cell >= cells - 6]
        assert done.v is not None
        assert done.bias is not None
        assert view.bias is not None
        torch.testing.assert_close(done.v[0, head, same], view.v[0, head, kept[same]])
        torch.testing.assert_close(done.bias[0, head, same], view.bias[0, head, kept[same]])


def test_a_thought_that_few_look_at_keeps_its_share() -> None:
    """sqrt(weight x size): more than eviction by attention would leave it."""
    view = view_for(TAM(), [[96, 96]], gaps=False)
    assert view.queries is not None
    ends = torch.tensor([[32, 64, 96]])
    q, k = view.queries.clone(), view.k.clone()
    q[..., 0] = 1.0
    k[..., 0] = torch.tensor([3.0] * 32 + [-3.0] * 32 + [3.0] * 32)  # nobody looks at the second
    view = view._replace(k=k, queries=q, thoughts=ends, end=97)
    counts = {}
    for policy in (TAM(tail=0, shortest=16), AM(tail=0)):
        keep = policy.compact(view, policy.utility(view, 24), torch.tensor([[24, 24]])).keep
        counts[type(policy)] = [int(((keep[0, 0] >= 32) & (keep[0, 0] < 64)).sum())]
    assert counts[TAM] > counts[AM]


@pytest.mark.parametrize(
    ("ends", "last", "expected"),
    [
        ([], 100, []),
        ([40, 80, -1], 120, [40, 80]),
        ([10, 40, 50, 75, 110], 120, [40, 75]),  # 10 and 50 join the next, 110 leaves too little
        ([20], 40, []),
    ],
)
def test_short_thoughts_are_merged(ends: list[int], last: int, expected: list[int]) -> None:
    assert merged(ends, 32, last) == expected


def test_cells_know_their_thought() -> None:
    view = view_for(TAM(), [[50, 50]], gaps=False)
    view = view._replace(thoughts=torch.tensor([[12, 30, -1]]), end=50)
    expected = [sum(pos >= end for end in (12, 30)) for pos in view.pos[0, 0].tolist()]
    assert thoughts_of(view, 10)[0, 0].tolist() == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 9)), min_size=1), st.integers(0, 40))
def test_shares_are_whole_and_near_their_quotas(rows: list[tuple[float, int]], total: int) -> None:
    weight = torch.tensor([[w for w, _ in rows], [1.0] * len(rows)], dtype=torch.float64)
    most = torch.tensor([[m for _, m in rows]] * 2)
    shares = largest_remainder(weight, most, torch.tensor([total, total]))
    there = int(most[0].sum())
    for each in shares:
        assert (each >= 0).all()
        assert (each <= most[0]).all()
        assert int(each.sum()) == min(total, there)
        if total >= int((most[0] > 0).sum()):
            assert (each[most[0] > 0] >= 1).all()


def test_shares_by_hand() -> None:
    def shares(weight: list[float], most: list[int], total: int) -> list[int]:
        given = torch.tensor([weight], dtype=torch.float64)
        return largest_remainder(given, torch.tensor([most]), torch.tensor([total]))[0].tolist()

    assert shares([5.0, 3.0, 2.0], [9, 9, 9], 10) == [5, 3, 2]
    assert shares([5.5, 2.7, 1.8], [9, 9, 9], 10) == [5, 3, 2]  # the largest remainders
    assert shares([9.0, 0.5, 0.5], [9, 9, 9], 10) == [8, 1, 1]
    assert shares([9.0, 0.6, 0.4], [3, 9, 9], 10) == [3, 4, 3]  # what it can't hold goes on
    assert shares([5.0, 3.0, 2.0], [9, 9, 9], 2) == [1, 1, 0]


def test_ranks_are_within_groups() -> None:
    score = torch.tensor([[0.1, 0.9, 0.5, 0.5, 0.2]])
    group = torch.tensor([[0, 1, 0, 0, 1]])
    assert rank_within(score, group).tolist() == [[2, 0, 1, 0, 1]]


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 20), st.integers(0, 1000))
def test_bounded_least_squares_is_the_minimum(cells: int, rows: int, seed: int) -> None:
    """By its optimality conditions: the slope points out of the box where x is at a bound."""
    noise = torch.Generator().manual_seed(seed)
    a = torch.rand(2, rows, cells, generator=noise, dtype=torch.float64)
    gram = a.mT @ a
    gram = gram + 0.1 * norm_bound(gram)[..., None, None] * torch.eye(cells)
    target = 3 * torch.randn(2, cells, generator=noise, dtype=torch.float64)
    x = bounded_least_squares(gram, target, torch.ones(2, cells).double(), 0.5, 2.0)
    slope = (gram @ x[..., None])[..., 0] - target
    tolerance = 1e-3 * (1 + target.abs().max())
    assert ((x >= 0.5) & (x <= 2.0)).all()
    assert (slope[x > 0.5] < tolerance).all()
    assert (slope[x < 2.0] > -tolerance).all()


def test_factors_give_the_mass_back() -> None:
    """Of equal cells of which a quarter stays, each stands for four; those left alone count too."""
    columns = torch.full((1, 1, 5, 10), 1 / 40, dtype=torch.float64)
    fitted = torch.ones(1, 1, 10, dtype=torch.bool)
    torch.testing.assert_close(fit_factors(columns, fitted, 1e-3), 4 * columns.new_ones(1, 1, 10))
    fitted[..., :2] = False
    factor = fit_factors(columns, fitted, 1e-3)[0, 0]
    assert factor[:2].tolist() == [1, 1]
    torch.testing.assert_close(factor[2:], columns.new_full((8,), 38 / 8))
    few = torch.full((1, 1, 5, 1), 1e-4, dtype=torch.float64)
    assert float(fit_factors(few, few[:, :, 0] > 0, 1e-3)) == pytest.approx(MOST)


@dataclass(frozen=True)
class Watched(TAM):
    """Notes what it saw and what it answered."""

    seen: list[tuple[LayerView, Compaction]] = field(default_factory=list)

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        done = super().compact(view, utility, budget)
        self.seen.append((view, done))
        return done


def test_on_every_layer_it_also_serves_the_queries_to_come(make_engine: MakeEngine) -> None:
    policy = Watched(queries=16, tail=8, shortest=8)
    engine = make_engine(kv=KVSpec(policy=policy, budget_tokens=32, window=32))
    for prompt in prompts(8, seed=4):
        engine.add(prompt * 3, greedy(140))
    run_all(engine)
    fits: dict[int, list[tuple[float, float]]] = {}
    rounds: dict[int, tuple[LayerView, Compaction]] = {}
    for view, done in policy.seen:
        fitted, unbiased = errors(view, done)
        assert (fitted < 0.5 * unbiased).all()
        assert view.thoughts is not None
        key = int(view.thoughts[0, 0])  # the prompt's length says whose it is
        if key in rounds:
            before, then = rounds[key]
            later = before._replace(queries=view.queries, query_pos=view.query_pos)
            new, old = (error.mean(1).tolist() for error in errors(later, then))  # [S]
            for layer, *pair in zip(view.layer.tolist(), new, old, strict=True):
                fits.setdefault(layer, []).append((pair[0], pair[1]))
        rounds[key] = view, done
    assert sorted(fits) == [0, 1]
    for pairs in fits.values():
        assert sum(new for new, _ in pairs) < 0.5 * sum(old for _, old in pairs)
