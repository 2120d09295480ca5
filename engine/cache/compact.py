"""Compaction: a policy sees each layer's cells, says which stay, and pages come free.

It happens at positions that depend on the sequence alone (points.py), one slot at a time, so that
neither its time nor its numbers depend on the batch. All layers of a slot have the same span, so
those of the same budget make one view: a layer alone would cost more in calls than in work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from engine.cache.repack import pack, packed_sources, rewrite
from engine.cache.tables import pages_for
from engine.cache.view import Compaction, LayerView

_CELLS_AT_ONCE = 2**16
"""Cells of all heads that one view holds at most, unless a single layer has more: what layers give
each other in time, they take in memory."""

Read = Callable[[NDArray[np.int64]], Cells]
"""Cells by address."""


class _Offer(NamedTuple):
    """The run of cells that each head of a layer offers."""

    layer: int
    start: int  # positions
    end: int
    first: Ints  # [H] index of the first cell
    cells: Ints  # [H] how many
    where: NDArray[np.int64]  # [H, N] addresses of all cells that the layer holds
    packed: Ints  # [H] how many of them are packed, the first ones

    def addresses(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """[H, N] of each head's cells on offer by `index` [N]; past its last it may be any."""
        at = (self.first[:, None] + index).clip(max=self.where.shape[1] - 1)
        return np.take_along_axis(self.where, at, 1)


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
        tables, parts = self._tables, self._parts
        before = int(parts.held(slot).sum())
        for total, offers in self._groups(slot):
            self._layers(slot, total, offers)
        tables.held_pages[slot] = int(tables.taken[slot].sum())
        tables.compacted_at[slot] = tables.ready[slot] = now = tables.computed[slot]
        if parts.packed is not None:
            pack(parts, parts.packed, slot)
            parts.packed.groups.renew(slot, now, now)
        held = parts.held(slot)
        tables.base[slot] = -(-held.sum(-1) // held.shape[1])
        return before - int(held.sum())

    def _groups(self, slot: int) -> Iterator[tuple[int, list[_Offer]]]:
        """Layers that offer cells, by budget: as many together as one view may hold."""
        offers: dict[int, list[_Offer]] = {}
        for layer, total in enumerate(self._budgets.layers(self._tables.budget[slot])):
            offer = self._offer(slot, layer)
            if offer.cells.any():
                offers.setdefault(total, []).append(offer)
        for total, alike in offers.items():
            most = max(int(offer.cells.max()) * offer.cells.size for offer in alike)
            at_once = max(1, _CELLS_AT_ONCE // most)
            for at in range(0, len(alike), at_once):
                yield total, alike[at : at + at_once]

    def _layers(self, slot: int, total: int, offers: Sequence[_Offer]) -> None:
        view = self._view(slot, offers)
        utility = self._policy.utility(view, total)
        even = torch.full_like(view.valid[..., 0], total, dtype=torch.int64)  # [S, H]
        demand = utility.masked_fill(self._policy.protected(view, even), torch.inf)
        budget = self._allocation.head_budgets(demand, view.valid, total)
        done = self._policy.compact(view, utility, budget.minimum(view.valid.sum(-1)))
        if done.bias is not None and self._store.bias is None:
            raise ValueError(f"{self._policy} gives biases: it must say so by `bias = True`")
        for row, offer in enumerate(offers):
            mine = (None if x is None else x[row, None] for x in done)
            self._apply(slot, offer, Compaction(*mine))  # type: ignore[arg-type]

    def _offer(self, slot: int, layer: int) -> _Offer:
        tables = self._tables
        length, now = self._parts.held(slot)[layer], tables.computed[slot]
        last = tables.compacted_at[slot]
        start, end = self._policy.span(tables.prompt_len[slot], last, now)
        where, packed = self._parts.addresses(slot, layer)
        if (start, end) == (0, now):
            return _Offer(layer, start, end, np.zeros_like(length), length, where, packed)
        pos = self._parts.read_pos(where)
        held = np.arange(pos.shape[1]) < length[:, None]  # [H, N]
        first, until = ((held & (pos < edge)).sum(1, dtype=np.int32) for edge in (start, end))
        return _Offer(layer, start, end, first, np.maximum(until - first, 0), where, packed)

    def _view(self, slot: int, offers: Sequence[_Offer]) -> LayerView:
        tables, device = self._tables, self._store.k.device
        index = np.arange(max(offer.cells.max() for offer in offers))
        cells = np.stack([offer.addresses(index) for offer in offers])  # [S, H, N]
        layers = np.array([offer.layer for offer in offers])
        k, v, pos, bias = (
            None if x is None else x.view(*cells.shape, *x.shape[1:])
            for x in self._parts.read(cells.reshape(-1))
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
            offers[0].start,
            offers[0].end,
            k,
            v,
            pos.long(),
            upload(index < np.stack([offer.cells for offer in offers])[..., None]),
            queries,
            query_pos,
            bias,
            upload(np.array(bounds, dtype=np.int64)).expand(len(layers), -1),
            upload(key.astype(np.int64)).expand(len(layers)),
        )

    def _apply(self, slot: int, offer: _Offer, done: Compaction) -> None:
        """Packed pages first, whose cells are the first ones; the rest closes its gaps."""
        layer = offer.layer
        length = self._parts.held(slot)[layer]
        index = np.arange(offer.where.shape[1])
        first, after = offer.first[:, None], (offer.first + offer.cells)[:, None]  # [H, 1]
        stays = ~((index >= first) & (index < after)) & (index < length[:, None])  # [H, N]
        keep = done.keep[0].cpu().numpy()  # [H, M]
        heads, chosen = np.nonzero(keep >= 0)
        kept = offer.first[heads] + keep[heads, chosen]
        stays[heads, kept] = True
        given = _Given.of(done, offer.where[heads, kept], heads, chosen)

        def read(addresses: NDArray[np.int64]) -> Cells:
            return given.put(self._parts.read(addresses), addresses)

        packed, count = self._parts.packed, offer.packed
        if packed is not None and count.any():
            sources = packed_sources(packed, slot, layer)
            touched = given.touches(sources.cells) & sources.stays
            before = sources.stays.copy()
            sources.stays[before] = stays[index < count[:, None]]
            sources.worn[:] = ((before & ~sources.stays) | touched).any(2)
            sources.anew[:] = touched.any(2) & given.replaces
            if sources.worn.any():
                rewrite(self._parts, packed, slot, layer, sources, read)
        left = np.arange(int((length - count).max())) + count[:, None]
        plain = np.take_along_axis(stays, left.clip(max=len(index) - 1), 1)
        plain &= left < length[:, None]
        self._close_gaps(slot, layer, plain, np.maximum(offer.first - count, 0), read)

    def _close_gaps(
        self, slot: int, layer: int, stays: NDArray[np.bool_], first: Ints, read: Read
    ) -> None:
        """Of each head's plain cells [H, N], move those that stay up, from the page of the
        `first` [H] on offer on. Pages are let go before others are taken, so it never needs more
        than the slot has; a shared one is left to its other users."""
        tables, store = self._tables, self._store
        moved = stays & (np.arange(stays.shape[1]) >= first[:, None] // PAGE * PAGE)
        heads, index = np.nonzero(moved)
        src = tables.layer_cells(slot, layer, heads, index)
        cells = read(src + self._parts.plain_base)
        length = stays.sum(1, dtype=np.int32)  # [H]
        self._exchange(slot, layer, first // PAGE, pages_for(length))
        rank = (stays.cumsum(1) - 1)[moved]
        dst = torch.from_numpy(tables.layer_cells(slot, layer, heads, rank)).to(store.k.device)
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


class _Given(NamedTuple):
    """The rows that a compaction gives, by the addresses of the cells that they replace."""

    done: Compaction
    addresses: NDArray[np.int64]  # [N] ascending
    heads: NDArray[np.intp]  # [N] rows of `done`
    rows: NDArray[np.intp]

    @classmethod
    def of(
        cls,
        done: Compaction,
        addresses: NDArray[np.int64],
        heads: NDArray[np.intp],
        rows: NDArray[np.intp],
    ) -> _Given:
        order = np.argsort(addresses)
        return cls(done, addresses[order], heads[order], rows[order])

    @property
    def replaces(self) -> bool:
        return self.done.k is not None or self.done.v is not None

    def touches(self, addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which cells get something of it."""
        if not self.replaces and self.done.bias is None:
            return np.zeros(addresses.shape, dtype=np.bool_)
        return np.isin(addresses, self.addresses)

    def put(self, cells: Cells, addresses: NDArray[np.int64]) -> Cells:
        at = np.flatnonzero(self.touches(addresses))
        if not at.size:
            return cells
        found = np.searchsorted(self.addresses, addresses[at])
        device = cells.k.device
        index, heads, rows = (
            torch.from_numpy(x).to(device) for x in (at, self.heads[found], self.rows[found])
        )

        def put(own: Tensor, given: Tensor | None) -> Tensor:
            if given is None:
                return own
            return own.index_copy(0, index, given[0, heads, rows].to(own.dtype))

        bias = None if cells.bias is None else put(cells.bias, self.done.bias)
        return cells._replace(k=put(cells.k, self.done.k), v=put(cells.v, self.done.v), bias=bias)
