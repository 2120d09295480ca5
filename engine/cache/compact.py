"""Compaction: a policy sees each layer's cells, says which stay, and pages come free.

It happens at positions that depend on the sequence alone (points.py), one slot at a time, so that
neither its time nor its numbers depend on the batch.
"""

from __future__ import annotations

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
from engine.cache.tables import pages_for
from engine.cache.view import Compaction, LayerView


class _Offer(NamedTuple):
    """The run of cells that each head of a layer offers."""

    start: int  # positions
    end: int
    first: Ints  # [H] index of the first cell
    cells: Ints  # [H] how many


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
        for layer, total in enumerate(self._budgets.layers(tables.budget[slot])):
            offer = self._offer(slot, layer)
            if offer.cells.any():
                self._layer(slot, layer, total, offer)
        tables.held_pages[slot] = int(tables.taken[slot].sum())
        tables.base[slot] = -(-tables.length[slot].sum(-1) // tables.length.shape[2])
        tables.compacted_at[slot] = tables.ready[slot] = tables.computed[slot]
        return before - int(tables.length[slot].sum())

    def _layer(self, slot: int, layer: int, total: int, offer: _Offer) -> None:
        view = self._view(slot, layer, offer)
        utility = self._policy.utility(view, total)
        even = torch.full_like(view.valid[..., 0], total, dtype=torch.int64)  # [S, H]
        demand = utility.masked_fill(self._policy.protected(view, even), torch.inf)
        budget = self._allocation.head_budgets(demand, view.valid, total)
        done = self._policy.compact(view, utility, budget.minimum(view.valid.sum(-1)))
        if done.bias is not None and self._store.bias is None:
            raise ValueError(f"{self._policy} gives biases: it must say so by `bias = True`")
        self._apply(slot, layer, offer, done)

    def _offer(self, slot: int, layer: int) -> _Offer:
        tables = self._tables
        length, now = tables.length[slot, layer], tables.computed[slot]
        last = tables.compacted_at[slot]
        start, end = self._policy.span(tables.prompt_len[slot], last, now)
        if (start, end) == (0, now):
            return _Offer(start, end, np.zeros_like(length), length)
        pos = self._store.pos.view(-1)[self._cells(slot, layer, 0 * length, length)].cpu().numpy()
        held = np.arange(pos.shape[1]) < length[:, None]  # [H, N]
        first, until = ((held & (pos < edge)).sum(1, dtype=np.int32) for edge in (start, end))
        return _Offer(start, end, first, np.maximum(until - first, 0))

    def _cells(self, slot: int, layer: int, first: Ints, count: Ints) -> Tensor:
        """Flat cells of each head from `first` [H] on, [H, N]; past its `count` it may be any."""
        index = first[:, None] + np.arange(count.max())
        index = index.clip(max=self._tables.width * PAGE - 1)
        cells = self._tables.layer_cells(slot, layer, np.arange(len(first))[:, None], index)
        return torch.from_numpy(cells).to(self._store.k.device)

    def _view(self, slot: int, layer: int, offer: _Offer) -> LayerView:
        tables, device = self._tables, self._store.k.device
        cells = self._cells(slot, layer, offer.first, offer.cells)
        k, v, pos, bias = (
            None if x is None else x.view(1, *cells.shape, *x.shape[1:])
            for x in self._store.read(cells.view(-1))
        )
        assert k is not None
        assert v is not None
        assert pos is not None
        ring, now = self._parts.ring, tables.computed[slot]
        queries, query_pos = (None, None) if ring is None else ring.read(layer, slot)
        seed, lineage, thought_ends = tables.whose[slot]
        bounds = [end for end in (tables.prompt_len[slot], *thought_ends) if end <= now]
        key = noise.hashed(*(noise.words([part]) for part in (seed, lineage, now)))

        def upload(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)[None]

        return LayerView(
            layer,
            offer.start,
            offer.end,
            k,
            v,
            pos.long(),
            upload(np.arange(cells.shape[1]) < offer.cells[:, None]),
            queries,
            query_pos,
            bias,
            upload(np.array(bounds, dtype=np.int64)),
            upload(key.astype(np.int64))[0],
        )

    def _apply(self, slot: int, layer: int, offer: _Offer, done: Compaction) -> None:
        """Close the gaps among the cells from each head's first page on offer. Pages are let go
        before others are taken, so it never needs more than the slot has; a shared one is left to
        its other users."""
        tables, store, device = self._tables, self._store, self._store.k.device
        length = tables.length[slot, layer]
        index = np.arange(length.max())
        first, after = offer.first[:, None], (offer.first + offer.cells)[:, None]  # [H, 1]
        offered = (index >= first) & (index < after)  # [H, N]
        stays = ~offered & (index < length[:, None])
        keep = done.keep[0].cpu().numpy()  # [H, M]
        heads, chosen = np.nonzero(keep >= 0)
        stays[heads, offer.first[heads] + keep[heads, chosen]] = True
        moved = stays & (index >= first // PAGE * PAGE)
        heads, index = np.nonzero(moved)
        src = tables.layer_cells(slot, layer, heads, index)
        replaced = torch.from_numpy(np.flatnonzero(offered[moved])).to(device)
        cells = _replaced(store.read(torch.from_numpy(src).to(device)), replaced, done)
        length = stays.sum(1, dtype=np.int32)  # [H]
        self._exchange(slot, layer, offer.first // PAGE, pages_for(length))
        rank = (stays.cumsum(1) - 1)[moved]
        dst = torch.from_numpy(tables.layer_cells(slot, layer, heads, rank)).to(device)
        store.write(dst, cells.k, cells.v)
        store.write_pos(dst, cells.pos)
        if cells.bias is not None:
            store.write_bias(dst, cells.bias)
        tables.length[slot, layer] = length

    def _exchange(self, slot: int, layer: int, first: Ints, taken: Ints) -> None:
        """Drop each head's pages from `first` [H] on and take what `taken` [H] pages need."""
        table, old = self._tables.table[slot, layer], self._tables.taken[slot, layer]
        columns = np.arange(table.shape[-1])
        after = columns >= first[:, None]
        self._parts.pool.drop(table[after & (columns < old[:, None])])
        fresh = after & (columns < taken[:, None])  # [H, P]
        table[fresh] = self._parts.prefix.take(int(fresh.sum()))
        self._tables.taken[slot, layer] = taken


def _replaced(cells: Cells, at: Tensor, done: Compaction) -> Cells:
    """The rows that a compaction gives, in place of those at `at`: both in order of heads."""
    there = done.keep[0] >= 0

    def put(own: Tensor, given: Tensor | None) -> Tensor:
        return own if given is None else own.index_copy(0, at, given[0][there].to(own.dtype))

    bias = None if cells.bias is None else put(cells.bias, done.bias)
    return cells._replace(k=put(cells.k, done.k), v=put(cells.v, done.v), bias=bias)
