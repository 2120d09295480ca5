"""Compaction: a policy sees each layer's cells, says which stay, and pages come free.

It happens at positions that depend on the sequence alone, one slot at a time, so that neither its
time nor its numbers depend on the batch.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cache.pages import PAGE, Ints
from engine.cache.parts import Parts
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.tables import NEVER, pages_for
from engine.cache.view import KVShape, LayerView


class Compactor:
    """Applies one policy to slots whose time has come."""

    def __init__(self, policy: KVPolicy, shape: KVShape, spec: KVSpec, parts: Parts) -> None:
        self._policy = policy
        self._spec = spec
        self._tables = parts.tables
        self._store = parts.store
        self._parts = parts
        self._budgets = spec.allocation.layer_budgets(shape, spec.budget)
        if len(self._budgets) != shape.layers or sum(self._budgets) != spec.budget * shape.layers:
            raise ValueError(
                f"allocation {spec.allocation} gives {self._budgets} for {shape.layers} layers;"
                f" they must sum to {spec.budget} cells a layer"
            )

    def next_point(self, slot: int) -> int:
        """The first position after the last compaction where the policy is due."""
        tables, spec = self._tables, self._spec
        last, base = tables.compacted_at[slot], tables.base[slot]
        first = last + 1
        if not self._policy.streams_prompt:
            first = max(first, tables.prompt_len[slot])

        def due(fresh: int) -> bool:
            return self._policy.due(base, fresh, spec.budget, spec.window)

        return last + bisect_left(range(NEVER - last), True, lo=first - last, key=due)

    def compact(self, slot: int) -> int:
        """Compact every layer; how many cells went."""
        tables = self._tables
        before = int(tables.length[slot].sum())
        for layer in range(len(self._budgets)):
            self._layer(slot, layer)
        after = int(tables.length[slot].sum())
        tables.held_pages[slot] = int(tables.taken[slot].sum())
        tables.base[slot] = -(-after // tables.length[slot].size)
        tables.compacted_at[slot] = tables.ready[slot] = tables.computed[slot]
        tables.point[slot] = self.next_point(slot)
        return before - after

    def _layer(self, slot: int, layer: int) -> None:
        spec, policy = self._spec, self._policy
        view = self._view(slot, layer)
        total = self._budgets[layer]
        utility = policy.utility(view, total)
        budget = spec.allocation.head_budgets(utility, view.valid, total)
        budget = budget.minimum(view.valid.sum(-1))
        keep = policy.compact(view, utility, budget).keep[0].cpu().numpy()  # [H, M]
        length = self._tables.length[slot, layer]
        index = np.arange(length.max())
        stays = (index < view.start) | (index >= view.end)
        stays = stays & (index < length[:, None])  # [H, N]
        heads, rank = np.nonzero(keep >= 0)
        stays[heads, view.start + keep[heads, rank]] = True
        self._apply(slot, layer, view.start // PAGE, stays)

    def _view(self, slot: int, layer: int) -> LayerView:
        spec, tables, device = self._spec, self._tables, self._store.k.device
        length = tables.length[slot, layer]  # [H]
        start, end = self._policy.span(int(length.max()), spec.budget, spec.window)
        valid = np.arange(start, end) < length[:, None]  # [H, N]
        # Padding reads some cell of the table, masked by `valid`.
        index = np.broadcast_to(np.arange(start, end), valid.shape)
        heads = np.arange(len(length))[:, None]
        cells = torch.from_numpy(tables.layer_cells(slot, layer, heads, index)).to(device)
        found = self._store.read(cells.view(-1))
        k, v, pos = (x.view(1, *cells.shape, *x.shape[1:]) for x in found)
        ring = self._parts.ring
        queries, query_pos = (None, None) if ring is None else ring.read(layer, slot)
        mask = torch.from_numpy(valid).to(device)[None]
        return LayerView(layer, start, end, k, v, pos.long(), mask, queries, query_pos)

    def _apply(self, slot: int, layer: int, first: int, stays: NDArray[np.bool_]) -> None:
        """Close the gaps among the cells from page `first` on. Pages are let go before others are
        taken, so it never needs more than the slot has; a shared one is left to its other users.
        """
        tables, store = self._tables, self._store
        length = stays.sum(1, dtype=np.int32)  # [H]
        heads, index = np.nonzero(stays[:, first * PAGE :])
        src = tables.layer_cells(slot, layer, heads, index + first * PAGE)
        rank = (stays.cumsum(1) - 1)[:, first * PAGE :][heads, index]
        cells = store.read(torch.from_numpy(src).to(store.k.device))
        self._exchange(slot, layer, first, pages_for(length))
        dst = torch.from_numpy(tables.layer_cells(slot, layer, heads, rank)).to(store.k.device)
        store.write(dst, cells.k, cells.v)
        store.write_pos(dst, cells.pos)
        tables.length[slot, layer] = length

    def _exchange(self, slot: int, layer: int, first: int, taken: Ints) -> None:
        """Drop the layer's pages from `first` on and take what `taken` [H] pages a head need."""
        table, old = self._tables.table[slot, layer], self._tables.taken[slot, layer]
        columns = np.arange(table.shape[-1])
        after = columns >= first
        self._parts.pool.drop(table[after & (columns < old[:, None])])
        fresh = after & (columns < taken[:, None])  # [H, P]
        table[fresh] = self._parts.prefix.take(int(fresh.sum()))
        self._tables.taken[slot, layer] = taken
