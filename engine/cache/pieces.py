"""What of a slot is compacted together: the cells that some of its layers offer.

All layers of a slot have the same span, so those of the same budget make one view: a layer alone
would cost more in calls than in work. How many depends on the slot and the policy alone, so that
neither the batch nor the clock can change a number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.pages import Ints
from engine.cache.parts import Parts
from engine.cache.policy import KVPolicy

Layers = NDArray[np.int64]


class Piece(NamedTuple):
    """The run of cells that each head of some layers of one budget offers."""

    total: int  # the budget, cells a head
    start: int  # positions
    end: int
    layers: Layers  # [S]
    first: Ints  # [S, H] index of the first cell
    cells: Ints  # [S, H] how many
    held: Ints  # [S, H] how many it holds, those included
    where: NDArray[np.int64]  # [S, H, N] addresses of all cells that a head holds
    packed: Ints  # [S, H] how many of them are packed, the first ones

    def cells_offered(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Addresses of the cells on offer, any beyond a head's last, and which there are:
        [S, H, M]."""
        index = np.arange(int(self.cells.max()))
        at = (self.first[..., None] + index).clip(max=self.where.shape[-1] - 1)
        return np.take_along_axis(self.where, at, -1), index < self.cells[..., None]


def planned(
    parts: Parts, slot: int, policy: KVPolicy, budgets: list[int]
) -> list[tuple[int, Layers]]:
    """Budgets and the layers that have them, as many together as the policy's views may hold."""
    held, found = parts.held(slot), []  # [L, H]
    for total in dict.fromkeys(budgets):
        alike = np.flatnonzero(np.asarray(budgets) == total)
        most = int(held[alike].max()) * held.shape[1]
        at_once = max(1, policy.cells_at_once // max(most, 1))
        found += [(total, alike[at : at + at_once]) for at in range(0, len(alike), at_once)]
    return found


def offered(parts: Parts, slot: int, policy: KVPolicy, total: int, layers: Layers) -> Piece:
    """What the policy may choose from; perhaps nothing."""
    tables, held = parts.tables, parts.held(slot)[layers]  # [S, H]
    now = tables.computed[slot]
    start, end = span = policy.span(tables.prompt_len[slot], tables.compacted_at[slot], now)
    where, packed = parts.addresses(slot, layers)
    first, cells = np.zeros_like(held), held
    if span != (0, now):
        pos = parts.read_pos(where)
        there = np.arange(pos.shape[-1]) < held[..., None]  # [S, H, N]
        first, until = ((there & (pos < edge)).sum(-1, dtype=np.int32) for edge in span)
        cells = np.maximum(until - first, 0)
    return Piece(total, start, end, layers, first, cells, held, where, packed)
