"""Which are the best cells, and how a whole number is shared out. Letters as in view.py."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(utility: Tensor, valid: Tensor) -> Tensor:
    """Each cell's place among its head's valid ones, the best 0: [S, H, N] int64.

    Of equal cells the later is better: it's the more recent one.
    """
    utility = utility.masked_fill(~valid, -torch.inf)
    best = utility.flip(-1).sort(dim=-1, descending=True, stable=True).indices  # of the flipped
    rank = torch.empty_like(best)
    index = torch.arange(valid.shape[-1], device=best.device)
    return rank.scatter_(-1, best, index.expand_as(best)).flip(-1)


def keep_mask(utility: Tensor, valid: Tensor, budget: Tensor) -> Tensor:
    """Which are each head's `budget` [S, H] best valid cells (see `ranks`): [S, H, N] bool."""
    return valid & (ranks(utility, valid) < budget[..., None])


def keep_best(utility: Tensor, valid: Tensor, budget: Tensor) -> Tensor:
    """Indices of each head's best cells (see `keep_mask`), ascending, -1 at the end: [S, H, M]."""
    return ascending(keep_mask(utility, valid, budget))


def ascending(stays: Tensor) -> Tensor:
    """[S, H, N] bool -> [S, H, M] where it's true, ascending, -1 at the end."""
    cells, width = stays.shape[-1], int(stays.sum(-1).max())
    index = torch.arange(cells, device=stays.device)
    kept = index.expand_as(stays).masked_fill(~stays, cells).sort(dim=-1).values[..., :width]
    return kept.masked_fill(kept == cells, -1)


def best_of_layer(utility: Tensor, valid: Tensor, total: int) -> Tensor:
    """How many of the layer's `total` best cells each head has; all its cells if there are fewer.

    utility, valid [S, H, N] -> [S, H] int64
    """
    slots, heads, cells = valid.shape
    budget = torch.full((slots, 1), total, dtype=torch.int64, device=valid.device)
    stays = keep_mask(utility.reshape(slots, 1, -1), valid.reshape(slots, 1, -1), budget)
    return stays.view(slots, heads, cells).sum(-1)


def shared(weights: Tensor, total: int, least: Tensor, most: Tensor) -> Tensor:
    """`total` shared out in proportion to weights, each share from `least` to `most`: the one
    scale of the weights whose clipped shares sum to the total.

    Where even `most` doesn't take it all, the rest is shared out evenly beyond. All [..., n];
    int64, summing to `total` by largest remainder.
    """
    weights = weights.double()
    weights = weights.clamp(min=1e-12).maximum(1e-9 * weights.amax(-1, keepdim=True))
    least, most = least.double(), most.double()
    scales = torch.cat((least / weights, most / weights), -1).sort(-1).values  # [..., 2n]
    sums = (scales[..., None] * weights[..., None, :]).clamp(
        least[..., None, :], most[..., None, :]
    )
    sums = sums.sum(-1)  # [..., 2n]: a line between neighbouring scales
    right = (sums < total).sum(-1, keepdim=True).clamp(1, scales.shape[-1] - 1)
    low, high = sums.gather(-1, right - 1), sums.gather(-1, right)
    part = ((total - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    at = scales.gather(-1, right - 1).lerp(scales.gather(-1, right), part)
    shares = (at * weights).clamp(least, most)
    rest = (total - shares.sum(-1, keepdim=True)).clamp(min=0)
    return rounded(shares + rest / shares.shape[-1], total)


def rounded(shares: Tensor, total: int) -> Tensor:
    """Shares [..., n] that sum to `total`, as int64 that do: the largest remainders go up."""
    whole = shares.floor()
    order = (shares - whole).sort(dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(-1, order, torch.arange(shares.shape[-1], device=order.device).expand_as(order))
    lacking = total - whole.sum(-1, keepdim=True)
    return (whole + (rank < lacking)).long()
