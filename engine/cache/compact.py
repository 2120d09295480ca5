"""Compaction: a policy sees each layer's cells, says which stay, and pages come free.

It happens at positions that depend on the sequence alone (points.py), one slot at a time, so that
neither its time nor its numbers depend on the batch. All layers of a slot have the same span, so
those of the same budget make one view: a layer alone would cost more in calls than in work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine import noise
from engine.cache.budgets import Budgets
from engine.cache.format import Cells
from engine.cache.pages import PAGE, Ints
from engine.cache.parts import Parts
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.tables import Index, pages_for
from engine.cache.view import Compaction, LayerView

_CELLS_AT_ONCE = 2**16
"""Cells of all heads that one view holds at most, unless a single layer has more: what layers give
each other in time, they take in memory."""


class _Offer(NamedTuple):
    """The run of cells that each head of some layers offers."""

    layers: Index  # [S] with one budget
    start: int  # positions
    end: int
    first: Ints  # [S, H] index of the first cell
    cells: Ints  # [S, H] how many


class Compactor:
    """Applies one policy to slots whose time has come."""

    def __init__(self, policy: KVPolicy, spec: KVSpec, budgets: Budgets, parts: Parts) -> None:
        self._policy = policy
        self._allocation = spec.allocation
        self._budgets = budgets
        self._tables = parts.tables
        self._store = parts.store
        self._parts = parts

    def compact(self, slot: int) -> int:
        """Compact every layer; how many cells went."""
        tables = self._tables
        before = int(tables.length[slot].sum())
        for total, offer in self._offers(slot):
            self._layers(slot, total, offer)
        tables.held_pages[slot] = int(tables.taken[slot].sum())
        tables.base[slot] = -(-tables.length[slot].sum(-1) // tables.length.shape[2])
        tables.compacted_at[slot] = tables.ready[slot] = tables.computed[slot]
        return before - int(tables.length[slot].sum())

    def _layers(self, slot: int, total: int, offer: _Offer) -> None:
        view = self._view(slot, offer)
        utility = self._policy.utility(view, total)
        even = torch.full_like(view.valid[..., 0], total, dtype=torch.int64)  # [S, H]
        demand = utility.masked_fill(self._policy.protected(view, even), torch.inf)
        budget = self._allocation.head_budgets(demand, view.valid, total)
        done = self._policy.compact(view, utility, budget.minimum(view.valid.sum(-1)))
        if done.bias is not None and self._store.bias is None:
            raise ValueError(f"{self._policy} gives biases: it must say so by `bias = True`")
        self._apply(slot, offer, done)

    def _offers(self, slot: int) -> Iterator[tuple[int, _Offer]]:
        """Layers that offer cells, by budget: as many together as one view may hold."""
        start, end, first, cells = self._span(slot)
        budgets = np.array(self._budgets.layers(self._tables.budget[slot]))
        at_once = max(1, _CELLS_AT_ONCE // max(1, int(cells.max()) * cells.shape[1]))
        for total in np.unique(budgets).tolist():
            alike = np.flatnonzero((budgets == total) & cells.any(1))
            for at in range(0, alike.size, at_once):
                layers = alike[at : at + at_once]
                yield total, _Offer(layers, start, end, first[layers], cells[layers])

    def _span(self, slot: int) -> tuple[int, int, Ints, Ints]:
        """Positions on offer, from start to end; each head's first cell there and how many,
        [L, H]."""
        tables = self._tables
        length, now = tables.length[slot].copy(), tables.computed[slot]
        last = tables.compacted_at[slot]
        start, end = self._policy.span(tables.prompt_len[slot], last, now)
        if (start, end) == (0, now):
            return start, end, np.zeros_like(length), length
        every = np.arange(len(length))
        pos = self._store.pos.view(-1)[self._cells(slot, every, 0 * length, length)].cpu().numpy()
        held = np.arange(pos.shape[-1]) < length[..., None]  # [L, H, N]
        first, until = ((held & (pos < edge)).sum(-1, dtype=np.int32) for edge in (start, end))
        return start, end, first, np.maximum(until - first, 0)

    def _cells(self, slot: int, layers: Index, first: Ints, count: Ints) -> Tensor:
        """Flat cells of each head from `first` [S, H] on, [S, H, N]; past its `count` it may be
        any."""
        index = first[..., None] + np.arange(count.max())
        index = index.clip(max=self._tables.width * PAGE - 1)
        heads = np.arange(first.shape[1])[:, None]
        cells = self._tables.layer_cells(slot, layers[:, None, None], heads, index)
        return torch.from_numpy(cells).to(self._store.k.device)

    def _view(self, slot: int, offer: _Offer) -> LayerView:
        tables, device, layers = self._tables, self._store.k.device, offer.layers
        cells = self._cells(slot, layers, offer.first, offer.cells)
        k, v, pos, bias = (
            None if x is None else x.view(*cells.shape, *x.shape[1:])
            for x in self._store.read(cells.view(-1))
        )
        assert k is not None
        assert v is not None
        assert pos is not None
        ring, now = self._parts.ring, tables.computed[slot]
        queries, query_pos = (None, None) if ring is None else ring.read(layers, slot)
        seed, lineage, thought_ends = tables.whose[slot]
        bounds = [end for end in (tables.prompt_len[slot], *thought_ends) if end <= now]
        key = noise.hashed(*(noise.words([part]) for part in (seed, lineage, now)))

        def upload(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        return LayerView(
            upload(layers),
            offer.start,
            offer.end,
            k,
            v,
            pos.long(),
            upload(np.arange(cells.shape[-1]) < offer.cells[..., None]),
            queries,
            query_pos,
            bias,
            upload(np.array(bounds, dtype=np.int64)).expand(len(layers), -1),
            upload(key.astype(np.int64)).expand(len(layers)),
        )

    def _apply(self, slot: int, offer: _Offer, done: Compaction) -> None:
        """Close the gaps among the cells from each head's first page on offer. Pages are let go
        before others are taken, so it never needs more than the slot has; a shared one is left to
        its other users."""
        tables, store, device = self._tables, self._store, self._store.k.device
        length = tables.length[slot, offer.layers]  # [S, H]
        index = np.arange(length.max())
        first, after = offer.first[..., None], (offer.first + offer.cells)[..., None]
        offered = (index >= first) & (index < after)  # [S, H, N]
        stays = ~offered & (index < length[..., None])
        keep = done.keep.cpu().numpy()  # [S, H, M]
        rows, heads, chosen = np.nonzero(keep >= 0)
        stays[rows, heads, offer.first[rows, heads] + keep[rows, heads, chosen]] = True
        moved = stays & (index >= first // PAGE * PAGE)
        rows, heads, index = np.nonzero(moved)
        layers = offer.layers[rows]
        src = tables.layer_cells(slot, layers, heads, index)
        replaced = torch.from_numpy(np.flatnonzero(offered[moved])).to(device)
        cells = _replaced(store.read(torch.from_numpy(src).to(device)), replaced, done)
        length = stays.sum(-1, dtype=np.int32)  # [S, H]
        self._exchange(slot, offer.layers, offer.first // PAGE, pages_for(length))
        rank = (stays.cumsum(-1) - 1)[moved]
        dst = torch.from_numpy(tables.layer_cells(slot, layers, heads, rank)).to(device)
        store.write(dst, cells.k, cells.v)
        store.write_pos(dst, cells.pos)
        if cells.bias is not None:
            store.write_bias(dst, cells.bias)
        tables.length[slot, offer.layers] = length

    def _exchange(self, slot: int, layers: Index, first: Ints, taken: Ints) -> None:
        """Drop each head's pages from `first` [S, H] on and take what `taken` [S, H] pages need."""
        table, old = self._tables.table[slot, layers], self._tables.taken[slot, layers]
        columns = np.arange(table.shape[-1])
        after = columns >= first[..., None]
        self._parts.pool.drop(table[after & (columns < old[..., None])])
        fresh = after & (columns < taken[..., None])  # [S, H, P]
        table[fresh] = self._parts.prefix.take(int(fresh.sum()))
        self._tables.table[slot, layers] = table
        self._tables.taken[slot, layers] = taken


def _replaced(cells: Cells, at: Tensor, done: Compaction) -> Cells:
    """The rows that a compaction gives, in place of those at `at`: both in order of layers and
    heads."""
    there = done.keep >= 0

    def put(own: Tensor, given: Tensor | None) -> Tensor:
        return own if given is None else own.index_copy(0, at, given[there].to(own.dtype))

    bias = None if cells.bias is None else put(cells.bias, done.bias)
    return cells._replace(k=put(cells.k, done.k), v=put(cells.v, done.v), bias=bias)
