"""One forward pass's view of the cache: where its tokens' cells go, and what they attend to.

Where layers attend one by one, everything that depends on tables is worked out and uploaded once;
a layer only writes and reads. Rows of one token attend together, longer rows each alone; what a
row's numbers are doesn't depend on the others. Layers that do all by themselves get the tables as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.pages import PAGE
from engine.cache.parts import Parts
from engine.cache.ring import Remembered
from engine.kernels.attention import Attend
from engine.kernels.layers import StepCells
from engine.kernels.packed import PackedCells

Array = NDArray[np.int64]


class Rows(NamedTuple):
    """The rows of a step."""

    slots: Array  # [R]
    starts: Array  # [R]
    counts: Array  # [R]


class Group(NamedTuple):
    """Rows of equal count that attend in one call: B rows of M tokens."""

    tokens: Tensor | None  # [B * M] rows of q; None: all, in order
    table: Tensor  # [L, B, H, P]
    lengths: Tensor  # [L, B, H], this step's cells included
    q_pos: Tensor  # [B, M]
    packed: tuple[Tensor, Tensor] | None  # pages and fills [L, B, H, G]


class StepKV:
    """Handed to the decoder: `attend` once a layer, or `cells` for all of them; then `finish`."""

    def __init__(
        self, parts: Parts, attend: Attend, rows: Rows, advance: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._attend = attend
        self._rows = rows
        self._advance = advance
        self._remembered = _remembered(parts, rows)

    @cached_property
    def _plan(self) -> _Plan:
        return _planned(self._parts, self._rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [T, H, D] and attend with q [T, Hq, D] -> [T, Hq, D]."""
        plan = self._plan
        self._parts.store.write(plan.cells[layer], k.flatten(0, 1), v.flatten(0, 1))
        if self._remembered is not None:
            assert self._parts.ring is not None
            self._parts.ring.write(layer, self._remembered, q)
        if len(plan.groups) == 1:
            return self._group(layer, plan.groups[0], q)
        out = torch.empty_like(q)
        for group in plan.groups:
            out[group.tokens] = self._group(layer, group, q[group.tokens])
        return out

    def _group(self, layer: int, group: Group, q: Tensor) -> Tensor:
        rows = q.reshape(*group.q_pos.shape, *q.shape[1:])  # [B, M, Hq, D]
        store = self._parts.store
        table, lengths = group.table[layer], group.lengths[layer]
        pools = store.k, store.v, store.pos
        packed = self._packed(layer, group)
        out = self._attend(rows, *pools, table, lengths, group.q_pos, store.bias, packed)
        return out.reshape(q.shape)

    def _packed(self, layer: int, group: Group) -> PackedCells | None:
        if self._parts.packed is None or group.packed is None:
            return None
        table, fill = group.packed
        return self._parts.packed.store.with_tables(table[layer], fill[layer])

    def cells(self) -> StepCells:
        """For layers that append and attend by themselves."""
        tables, store, ring = self._parts.tables, self._parts.store, self._parts.ring
        if store.bias is not None:
            store.write_bias(_new_cells(self._parts, self._rows).view(-1), 0.0)
        data, at = None, None
        if self._remembered is not None:
            assert ring is not None
            data = ring.data
            at = np.full(int(self._rows.counts.sum()), -1)
            at[self._remembered.tokens.numpy()] = self._remembered.rows.numpy()
        pools = store.k, store.v, store.pos
        held = tables.table, tables.length
        packed = None
        if self._parts.packed is not None:
            groups = self._parts.packed.groups
            own = torch.from_numpy(groups.table), torch.from_numpy(groups.fill)
            packed = self._parts.packed.store.with_tables(*own)
        return StepCells(*pools, *held, *self._rows, data, at, store.bias, packed)

    def finish(self) -> None:
        """Every layer has run: the cells count from now on. Call it once."""
        if self._remembered is not None:
            assert self._parts.ring is not None
            self._parts.ring.commit(self._remembered)
        self._advance()


class _Plan(NamedTuple):
    """What layers that attend one by one need, uploaded once."""

    cells: Tensor  # [L, T * H]
    groups: Sequence[Group]


def _remembered(parts: Parts, rows: Rows) -> Remembered | None:
    if parts.ring is None:
        return None
    # The last of a row, and of those only what the next compaction may read: no row goes past it.
    ends = np.maximum(rows.starts + rows.counts, np.asarray(parts.tables.early)[rows.slots])
    owner, pos = _owners(rows)
    return parts.ring.select(rows.slots[owner], pos, ends[owner])


def _owners(rows: Rows) -> tuple[Array, Array]:
    """Each token's row and position, [T]."""
    owner = np.repeat(np.arange(len(rows.slots)), rows.counts)
    first = np.cumsum(rows.counts) - rows.counts
    return owner, rows.starts[owner] + np.arange(len(owner)) - first[owner]


def _new_cells(parts: Parts, rows: Rows) -> Tensor:
    """Where each layer's cells of the step's tokens go, [L, T, H]."""
    owner, pos = _owners(rows)
    cells = parts.tables.cells(rows.slots[owner], pos - rows.starts[owner]).transpose(1, 0, 2)
    return torch.from_numpy(np.ascontiguousarray(cells)).to(parts.store.k.device)


def _planned(parts: Parts, rows: Rows) -> _Plan:
    """Positions and biases of the new cells, which no layer changes, are written here."""
    store = parts.store
    device, cells = store.k.device, _new_cells(parts, rows)
    token_pos = torch.from_numpy(_owners(rows)[1].astype(np.int32)).to(device)[:, None]
    store.write_pos(cells.view(-1), token_pos.expand(cells.shape).reshape(-1))
    store.write_bias(cells.view(-1), 0.0)
    first = np.cumsum(rows.counts) - rows.counts  # [R] each row's first token
    return _Plan(cells.flatten(1), _groups(parts, rows, first))


def _groups(parts: Parts, rows: Rows, first: Array) -> list[Group]:
    single = np.flatnonzero(rows.counts == 1)
    members = [single] if single.size else []
    members += [np.array([row]) for row in np.flatnonzero(rows.counts > 1)]
    return [_group(parts, rows, first, chosen, len(members) == 1) for chosen in members]


def _group(parts: Parts, rows: Rows, first: Array, chosen: Array, alone: bool) -> Group:
    tables, device = parts.tables, parts.store.k.device
    slots, span = rows.slots[chosen], np.arange(rows.counts[chosen[0]])
    lengths = tables.length[slots] + rows.counts[chosen, None, None].astype(np.int32)  # [B, L, H]
    width = -(-int(lengths.max()) // PAGE)
    table = tables.table[slots, :, :, :width]  # [B, L, H, P]

    def upload(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    packed = None
    if parts.packed is not None:
        groups = parts.packed.groups
        count = int(np.count_nonzero(groups.fill[slots].any((0, 1, 2))))
        if count:
            pages, fills = (a[slots, :, :, :count] for a in (groups.table, groups.fill))
            packed = upload(pages.transpose(1, 0, 2, 3)), upload(fills.transpose(1, 0, 2, 3))
    tokens = (first[chosen, None] + span).reshape(-1)
    return Group(
        None if alone else upload(tokens),
        upload(table.transpose(1, 0, 2, 3)),
        upload(lengths.transpose(1, 0, 2)),
        upload((rows.starts[chosen, None] + span).astype(np.int32)),
        packed,
    )
