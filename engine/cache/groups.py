"""Which packed pages a slot has: tables and fills on the host, vectorised over layers and heads.

A head's cells are those of its packed pages in order, each from its first to its fill, and then its
plain cells (tables.py), which are the last ones. When cells are packed depends on the sequence
alone: 64 tokens after its last compaction, and every 64 from there; and at a compaction.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.cache.pages import Ints
from engine.cache.view import KVShape
from engine.kernels.packed import PACK


class Groups:
    """Arrays over slots. Pages are `taken` before they are filled, so that packing never waits."""

    def __init__(self, shape: KVShape, slots: int, max_len: int, tail: int) -> None:
        self.width = self.most_pages(max_len)
        size = (slots, shape.layers, shape.kv_heads)
        self.tail = tail
        self.table: Ints = np.zeros((*size, self.width), dtype=np.int32)
        self.fill: Ints = np.zeros((*size, self.width), dtype=np.int32)
        self.taken: Ints = np.zeros(size, dtype=np.int32)
        self.held_pages = [0] * slots
        self.at = [PACK] * slots  # `computed` at which cells are packed next
        self._columns = np.arange(self.width)

    @staticmethod
    def most_pages(cells: int) -> int:
        """Pages that a head has for so many packed cells: a compaction may leave one more."""
        return -(-cells // PACK) + 1

    @staticmethod
    def slot_bytes(shape: KVShape, max_len: int) -> int:
        return shape.layers * shape.kv_heads * 4 * (2 * Groups.most_pages(max_len) + 1)

    @staticmethod
    def packed_of(tokens: int, tail: int) -> int:
        """Packed pages of each head after so many tokens, if none was evicted or cut off."""
        return max(tokens // PACK * PACK - tail, 0) // PACK

    def count(self, slot: int) -> Ints:
        """Filled pages of each head, [L, H]."""
        return (self.fill[slot] > 0).sum(-1, dtype=np.int32)

    def cells(self, slot: int) -> Ints:
        """Packed cells of each head, [L, H]."""
        return self.fill[slot].sum(-1, dtype=np.int32)

    def ahead(self, plain: Ints) -> Ints:
        """Pages that are packed off so many plain cells."""
        return np.maximum(plain - self.tail, 0) // PACK

    def used(self, slot: int) -> Ints:
        """Every page that the slot refers to, [n]."""
        return self.table[slot][self._columns < self.taken[slot, ..., None]]

    def set_taken(self, slot: int, taken: Ints, new: Ints) -> None:
        """Give heads their next pages from `new`, in (layer, head) order."""
        fresh = self._columns >= self.taken[slot][..., None]
        self.table[slot][fresh & (self._columns < taken[..., None])] = new
        self.taken[slot] = taken
        self.held_pages[slot] = int(taken.sum())

    def shrink(self, slot: int) -> Ints:
        """Unfilled pages leave the table: the ids, [n]."""
        count = self.count(slot)
        beyond = (self._columns >= count[..., None]) & (self._columns < self.taken[slot][..., None])
        self.taken[slot] = count
        self.held_pages[slot] = int(count.sum())
        return self.table[slot][beyond]

    def cut(self, slot: int, cells: Ints) -> tuple[NDArray[np.intp], ...]:
        """Take `cells` [L, H] off the heads' ends. A page that is only partly gone is emptied too:
        whose it was and how many cells it keeps, (layers, heads, columns, kept)."""
        fill = self.fill[slot]
        after = fill[..., ::-1].cumsum(-1)[..., ::-1] - fill  # cells of later pages
        left = np.clip(fill - np.maximum(cells[..., None] - after, 0), 0, None)
        layers, heads, columns = partly = np.nonzero((left > 0) & (left < fill))
        kept = left[partly].astype(np.intp)
        left[partly] = 0
        self.fill[slot] = left
        return layers, heads, columns, kept

    def renew(self, slot: int, compacted_at: int, computed: int) -> None:
        """When cells are packed next, after a change of either."""
        self.at[slot] = computed + PACK - (computed - compacted_at) % PACK

    def copy(self, slot: int, child: int) -> None:
        self.table[child] = self.table[slot]
        self.fill[child] = self.fill[slot]
        self.taken[child] = count = self.count(slot)
        self.held_pages[child] = int(count.sum())
        self.at[child] = self.at[slot]

    def clear(self, slot: int) -> None:
        self.fill[slot] = 0
        self.taken[slot] = 0
        self.held_pages[slot] = 0
        self.at[slot] = PACK
