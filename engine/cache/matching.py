"""Attention matching: kept cells get biases and values that stand for the cells that went.

Attention Matching (AM, Zweiger et al. 2026) of which TAM (arXiv 2608.12331) is made. For a head's
reference queries (the last ones of every query head of its group) the kept keys shall have the
attention mass of all keys, by a factor exp(beta) each, and then the same output, by new values.
Both are least squares, batched over layers and heads, in float32 (float64 with ridges so small that
it would show).

What differs: rows of the mass fit are divided by their target, so that each query's relative error
counts; both fits have a ridge (relative to the matrix), which pulls the factors to one common
factor and the values to the cells' own (AM's pulls to 0), so that where fewer queries than cells
leave it open, nothing is invented. That of the factors is large: with 1e-3 they went to their
bounds for a little mass, and the output of some heads became worse than without any fit. Factors
are bounded as in AM's evaluation. Cells that have a bias already keep it as part of their logits,
and their factor multiplies it. Reference queries see every cell, the few later than themselves too:
they stand for the queries to come.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache.choose import ascending
from engine.cache.policy import KVPolicy
from engine.cache.scores import older
from engine.cache.view import Compaction, LayerView

MOST = 20.085536923187668  # e^3: factors are from 1 / MOST to MOST
ITERATIONS = 25
SMALL = 1e-4  # a ridge from here on keeps float32's error below 1e-3 of a change


class Choice(NamedTuple):
    """Cells of the prefix that stay; those that are `verbatim` are left as they are."""

    stays: Tensor  # [S, H, N] bool
    verbatim: Tensor  # [S, H, N] bool


class MatchingPolicy(KVPolicy):
    """Keeps the last `tail` cells as they are, and of the others what `choose` says, refitted.

    A tail left None is 20 cells, at most half of the budget.
    """

    bias = True
    by_utility = False
    cells_at_once = 2**12

    queries: int
    tail: int | None
    ridge: float
    mass_ridge: float

    @abstractmethod
    def choose(self, view: LayerView, weights: Tensor, prefix: Tensor, budget: Tensor) -> Choice:
        """At most `budget` [S, H] cells of the `prefix` [S, H, N]; `weights` [S, H, R, N] is what
        each reference query gives to each cell of it, all zeros for a query that there isn't."""

    def utility(self, view: LayerView, budget: int) -> Tensor:
        return mean_weight(reference_weights(view, view.valid))

    def protected(self, view: LayerView, budget: Tensor) -> Tensor:
        return view.valid & ~older(view, self._tail(budget))

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        cells = view.valid.sum(-1)  # [S, H]
        tail = self._tail(budget).minimum(cells)
        index = torch.arange(view.valid.shape[-1], device=budget.device)
        prefix = view.valid & (index < (cells - tail)[..., None])
        weights = reference_weights(view, prefix)  # [S, H, R, N]
        whole = (cells <= budget)[..., None]  # nothing has to go
        choice = self.choose(view, weights, prefix, budget - tail)
        stays = torch.where(whole, view.valid, choice.stays | (view.valid & ~prefix))
        keep = ascending(stays)
        at = keep.clamp(min=0)

        def kept(x: Tensor) -> Tensor:
            return x.gather(-1, at) & (keep >= 0)

        fitted = kept(choice.stays & prefix & ~choice.verbatim & ~whole)
        held = kept(choice.stays & prefix)
        columns = weights.gather(-1, at[:, :, None].expand(-1, -1, weights.shape[2], -1))
        exact = torch.float32 if min(self.ridge, self.mass_ridge) >= SMALL else torch.float64
        columns = columns.to(exact).mul_(held[:, :, None])  # [S, H, R, M]
        rows = at[..., None].expand(-1, -1, -1, view.v.shape[-1])
        own = view.v.gather(2, rows).to(exact)  # [S, H, M, D]
        factor = fit_factors(columns, fitted, self.mass_ridge)
        wanted = (weights @ view.v.float()).to(exact)  # [S, H, R, D]
        v = fit_values(columns * factor[:, :, None], fitted, own, wanted, self.ridge)
        assert view.bias is not None
        bias = view.bias.gather(-1, at) + factor.log().float()
        return Compaction(keep, v=v.to(view.v.dtype), bias=bias)

    def _tail(self, budget: Tensor) -> Tensor:
        if self.tail is None:
            return (budget // 2).clamp(max=20)
        return (budget - 1).clamp(min=0, max=self.tail)

    def refuses(self, budget: int, window: int) -> str | None:
        if self.tail is not None and self.tail >= budget:
            return (
                f"a tail of {self.tail} cells leaves nothing of a budget of {budget}; make it"
                " smaller or leave it to its default, which shrinks"
            )
        return None


def check_fields(policy: MatchingPolicy) -> None:
    """ValueError: a field that all of them have is out of range."""
    if policy.queries < 1:
        raise ValueError(f"queries must be at least 1, not {policy.queries}")
    if policy.tail is not None and policy.tail < 0:
        raise ValueError(f"tail must be at least 0, not {policy.tail}")
    for name in ("ridge", "mass_ridge"):
        if not getattr(policy, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(policy, name)}")


def reference_weights(view: LayerView, cells: Tensor) -> Tensor:
    """Softmax attention over `cells` [S, H, N] of every remembered query of each kv head's group,
    biases included: [S, H, G * W, N] float32, zeros for queries that there aren't."""
    assert view.queries is not None
    assert view.query_pos is not None
    slots, window, q_heads, dim = view.queries.shape
    heads = view.k.shape[1]
    q = view.queries.float().view(slots, window, heads, q_heads // heads, dim)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, H, G * W, D]
    bias = torch.zeros_like(view.k[..., 0], dtype=q.dtype) if view.bias is None else view.bias
    bias = bias.masked_fill(~cells, torch.finfo(q.dtype).min)  # [S, H, N]
    logits = torch.baddbmm(
        bias.flatten(0, 1)[:, None],
        q.flatten(0, 1),
        view.k.float().flatten(0, 1).mT,
        alpha=dim**-0.5,
    )
    weights = logits.softmax(-1).view(slots, heads, *logits.shape[1:])  # [S, H, G * W, N]
    gone = (view.query_pos < 0).repeat(1, q_heads // heads)  # [S, G * W]
    weights[~cells.any(-1)[..., None] | gone[:, None]] = 0.0
    return weights


def mean_weight(weights: Tensor) -> Tensor:
    """Over the queries that there are, [S, H, R, N] -> [S, H, N]."""
    total = weights.sum(2)
    return total / total.sum(-1, keepdim=True).clamp(min=torch.finfo(total.dtype).tiny)


def fit_factors(columns: Tensor, fitted: Tensor, ridge: float) -> Tensor:
    """A factor for each kept cell, 1 where it isn't `fitted` [S, H, M], such that a query's weights
    on the kept cells, columns [S, H, R, M], sum to 1 again: [S, H, M]."""
    there = (columns.sum(-1) > 0).to(columns.dtype)  # [S, H, R]
    free = columns * fitted[:, :, None]
    missing = there - (columns.sum(-1) - free.sum(-1))
    mass = free.sum((2, 3))
    tiny = torch.finfo(mass.dtype).tiny
    even = missing.sum(-1) / mass.clamp(min=tiny)  # what all would need alike
    even = even.clamp(1 / MOST, MOST)[..., None].expand(fitted.shape)
    gram = free.mT @ free  # [S, H, M, M]
    pull = ridge * norm_bound(gram)
    target = (free.mT @ missing[..., None])[..., 0] + pull[..., None] * even
    gram = gram + pull[..., None, None] * torch.eye(gram.shape[-1], device=gram.device)
    found = bounded_least_squares(gram, target, even, 1 / MOST, MOST)
    return found.where(fitted, torch.ones_like(found))


def fit_values(
    columns: Tensor, fitted: Tensor, own: Tensor, wanted: Tensor, ridge: float
) -> Tensor:
    """Values of the kept cells, `own` [S, H, M, D] where not `fitted`, whose mixture by the kept
    cells' weights, columns [S, H, R, M], is `wanted` [S, H, R, D]: [S, H, M, D]."""
    total = columns.sum(-1, keepdim=True)
    mixed = columns / total.clamp(min=torch.finfo(total.dtype).tiny)
    left = (wanted - mixed @ own) * (total > 0)  # [S, H, R, D]
    free = mixed * fitted[:, :, None]
    gram = free.mT @ free
    pull = ridge * norm_bound(gram)
    gram = gram + pull[..., None, None] * torch.eye(gram.shape[-1], device=gram.device)
    change = torch.cholesky_solve(free.mT @ left, torch.linalg.cholesky(gram))
    return own + change


def norm_bound(gram: Tensor) -> Tensor:
    """At least the greatest eigenvalue of matrices without negative entries, and above 0."""
    return gram.sum(-1).amax(-1).clamp(min=1e-12)


def bounded_least_squares(
    gram: Tensor, target: Tensor, start: Tensor, low: float, high: float
) -> Tensor:
    """x in [low, high] with the least x' gram x / 2 - target' x: [..., M, M], [..., M] -> [..., M].

    Accelerated projected gradients, restarted where momentum leads uphill (O'Donoghue and Candes,
    arXiv 1204.3982). The number of iterations is fixed, so that a head's result doesn't depend on
    the others. gram has no negative entries and is positive definite.
    """
    size = 1 / norm_bound(gram)[..., None]
    x = ahead = start
    pace = torch.ones_like(size)
    for _ in range(ITERATIONS):
        slope = (gram @ ahead[..., None])[..., 0] - target
        step = (ahead - size * slope).clamp(low, high)
        uphill = ((ahead - step) * (step - x)).sum(-1, keepdim=True) > 0
        pace = torch.where(uphill, torch.ones_like(pace), pace)
        faster = (1 + (1 + 4 * pace**2).sqrt()) / 2
        ahead = step + torch.where(uphill, 0.0, (pace - 1) / faster) * (step - x)
        x, pace = step, faster
    return x
