"""Work on rows of vocabulary size [R, V] in which no row can feel its neighbours.

Sums and maxima go over blocks of fixed size first. That fixes the order of every sum whatever R
is (torch splits the sum of a single long row among threads, but not that of many), and it is
fast: the long pass is a plain vectorised reduction, all that follows is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 512


class Ranked(NamedTuple):
    """The best of each row: values descending, ids ascending among equals."""

    values: Tensor  # [R, C]
    ids: Tensor  # [R, C] int64


def _blocks(rows: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """Each block of each row reduced; the last block may be short."""
    whole = rows.shape[1] // _BLOCK * _BLOCK
    parts = [reduce(rows[:, :whole].view(len(rows), -1, _BLOCK), -1)] if whole else []
    if whole < rows.shape[1]:
        parts.append(reduce(rows[:, whole:], -1, keepdim=True))
    return torch.cat(parts, 1)  # [R, V / block, rounded up]


def _block_ids(block: Tensor) -> Tensor:
    """The ids in each row's block; those of a short last block run past V."""
    return block[:, None] * _BLOCK + torch.arange(_BLOCK, device=block.device)  # [R, block]


def row_sums(rows: Tensor) -> Tensor:
    """float64 [R]."""
    return _blocks(rows, torch.sum).double().sum(-1)


def row_max(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's greatest value and the lowest id that has it; a NaN counts as the greatest."""
    values, block = _blocks(rows, torch.amax).max(-1)
    ids = _block_ids(block).clamp_(max=rows.shape[1] - 1)
    inside = rows.gather(1, ids).argmax(-1, keepdim=True)
    return values, ids.gather(1, inside).squeeze(1)


def invert(cumulated: Tensor, total: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulated weight is above the target: never one of zero weight.

    `cumulated` [R, C] float64; `total` [R], at most its last column, bounds the target (a product
    u * total may round up to the total itself).
    """
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulated, target[:, None], right=True).squeeze(1)
    return found.clamp_(max=cumulated.shape[1] - 1)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """An id for each row, by inverting the cumulated weights in the order of ids, [R].

    First the block, then the id in it; only blocks' sums and one block a row are cumulated.
    """
    sums = _blocks(weights, torch.sum).double()
    cumulated = sums.cumsum(-1)
    total = cumulated[:, -1]
    target = uniform * total
    block = invert(cumulated, total, target)
    before = (cumulated - sums).gather(1, block[:, None]).squeeze(1)
    ids = _block_ids(block)
    last = weights.shape[1] - 1
    inside = weights.gather(1, ids.clamp(max=last)).masked_fill_(ids > last, 0.0).double()
    inside = inside.cumsum(-1)
    found = block * _BLOCK + invert(inside, inside[:, -1], target - before)
    return found.clamp_(max=last)


def ranked(rows: Tensor, count: int) -> Ranked:
    """`count` best values of each row (all, if there are fewer), in order.

    Which of several equals at the very end are among them isn't defined, unless all are.
    """
    if count >= rows.shape[1]:
        return Ranked(*rows.sort(dim=-1, descending=True, stable=True))
    ids = rows.topk(count, sorted=False).indices.sort(-1).values
    values, order = rows.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return Ranked(values, ids.gather(1, order))


def top(rows: Tensor, count: int) -> Ranked:
    """Exactly the `count` best (all, if there are fewer); of equals, the lowest ids."""
    count = min(count, rows.shape[1])
    if count == 0:
        empty = rows[:, :0]
        return Ranked(empty, empty.long())
    pool = ranked(rows, 2 * count + 16)
    unsure = pool.values[:, count - 1] == pool.values[:, -1]
    values, ids = pool.values[:, :count], pool.ids[:, :count]
    if pool.ids.shape[1] < rows.shape[1] and bool(unsure.any()):
        exact = ranked(rows[unsure], rows.shape[1])
        values[unsure], ids[unsure] = exact.values[:, :count], exact.ids[:, :count]
    return Ranked(values, ids)
