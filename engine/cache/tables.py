"""Which plain cells a slot has: tables and lengths, on the host, vectorised over layers and heads.

Cell c of a head lies in page table[c // 16] at offset c % 16. A slot's counters say which prefix
of its sequence the cells stand for, how far it may grow, and where the next compaction is.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cache.pages import PAGE, Ints
from engine.cache.view import KVShape

Index = NDArray[np.signedinteger[Any]]

NEVER = 2**30
"""A position that no sequence reaches."""


class Whose(NamedTuple):
    """What a compaction wants to know of the sequence that ran last in a slot."""

    seed: int
    lineage: int
    thought_ends: Seq[int]  # the sequence's own list


def pages_for(cells: Ints) -> Ints:
    """Pages that hold so many cells."""
    return -(-cells // PAGE)


class Tables:
    """Arrays over slots. `taken` pages a head may exceed what its length needs: room reserved."""

    def __init__(self, shape: KVShape, slots: int, most_cells: int) -> None:
        heads = (slots, shape.layers, shape.kv_heads)
        self.width = -(-most_cells // PAGE)
        self.table: Ints = np.zeros((*heads, self.width), dtype=np.int32)
        self.length: Ints = np.zeros(heads, dtype=np.int32)
        self.taken: Ints = np.zeros(heads, dtype=np.int32)
        self.computed = [0] * slots  # tokens that the cells stand for
        self.prompt_len = [0] * slots
        self.compacted_at = [0] * slots  # `computed` at the last compaction, 0: none yet
        self.base: Ints = np.zeros(heads[:2], dtype=np.int32)  # cells a head of each layer after it
        self.budget = [0] * slots  # cells a head, on average over the layers
        self.point = [NEVER] * slots  # `computed` at which the next compaction is due,
        self.limit = [NEVER] * slots  # wherever thoughts end,
        self.early = [NEVER] * slots  # and at the soonest
        self.whose = [Whose(0, 0, ())] * slots
        self.ready = [0] * slots  # tokens up to here have pages of the slot's own to go to
        self.held_pages = [0] * slots
        self._columns = np.arange(self.width)
        layers, kv_heads = np.indices(heads[1:], sparse=True)
        self._layers, self._heads = layers, kv_heads

    @staticmethod
    def slot_bytes(shape: KVShape, most_cells: int) -> int:
        return shape.layers * shape.kv_heads * 4 * (-(-most_cells // PAGE) + 2)

    def used(self, slot: int) -> Ints:
        """Every page that the slot refers to, [n]."""
        return self.table[slot][self._columns < self.taken[slot, ..., None]]

    def set_taken(self, slot: int, taken: Ints, new: Ints) -> None:
        """Give heads their next pages from `new`, in (layer, head) order."""
        old = self.taken[slot][..., None]
        self.table[slot][(self._columns >= old) & (self._columns < taken[..., None])] = new
        self.taken[slot] = taken
        self.held_pages[slot] = int(taken.sum())

    def shrink(self, slot: int, taken: Ints) -> Ints:
        """Pages beyond `taken` a head leave the table: the ids, [n]."""
        beyond = (self._columns >= taken[..., None]) & (self._columns < self.taken[slot, ..., None])
        gone = self.table[slot][beyond]
        self.taken[slot] = taken
        self.held_pages[slot] = int(taken.sum())
        return gone

    def tails(self, slot: int) -> tuple[NDArray[np.intp], ...]:
        """Where in table[slot] partly filled last pages stand: (layers, heads, columns)."""
        layers, heads = np.nonzero(self.length[slot] % PAGE)
        return layers, heads, self.length[slot][layers, heads] // PAGE

    def cells(self, slots: NDArray[np.intp], offsets: Ints) -> NDArray[np.int64]:
        """Flat cells of the offsets-th tokens to be appended to each: [T] -> [T, L, H]."""
        index = self.length[slots] + offsets[:, None, None]
        page = self.table[slots[:, None, None], self._layers, self._heads, index // PAGE]
        return page.astype(np.int64) * PAGE + index % PAGE

    def layer_cells(
        self, slot: int, layers: Index | int, heads: Index, index: Index
    ) -> NDArray[np.int64]:
        """Flat cells of given (layer, head, cell)."""
        page = self.table[slot, layers, heads, index // PAGE]
        return page.astype(np.int64) * PAGE + index % PAGE

    def copy(self, slot: int, child: int) -> None:
        """The child's table and counters become the slot's; it has no room reserved."""
        self.table[child] = self.table[slot]
        self.length[child] = self.length[slot]
        self.taken[child] = pages_for(self.length[slot])
        self.held_pages[child] = int(self.taken[child].sum())
        self.base[child] = self.base[slot]
        self.whose[child] = self.whose[slot]
        counters = (self.computed, self.prompt_len, self.compacted_at, self.budget)
        for counter in (*counters, self.point, self.limit, self.early):
            counter[child] = counter[slot]

    def clear(self, slot: int) -> None:
        """No cells; the prompt's length and the budget stay."""
        for array in (self.length, self.taken, self.base):
            array[slot] = 0
        for counter in (self.computed, self.compacted_at, self.ready, self.held_pages):
            counter[slot] = 0
