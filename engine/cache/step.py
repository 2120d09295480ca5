"""One forward pass's view of the cache: where its tokens' cells go, and what they attend to.

Everything that depends on tables is worked out and uploaded once, in `plan_step`; a layer only
writes and reads. Rows of one token attend together, longer rows each alone; what a row's numbers
are doesn't depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.format import CellStore
from engine.cache.pages import PAGE
from engine.cache.parts import Parts
from engine.cache.ring import QueryRing, Remembered
from engine.cache.tables import Tables
from engine.kernels.attention import Attend

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


class StepKV:
    """Handed to the decoder: `attend` once a layer, then `finish`."""

    def __init__(
        self,
        store: CellStore,
        attend: Attend,
        cells: Tensor,
        groups: Sequence[Group],
        memory: tuple[QueryRing, Remembered] | None,
        advance: Callable[[], None],
    ) -> None:
        self._store = store
        self._attend = attend
        self._cells = cells  # [L, T * H]
        self._groups = groups
        self._memory = memory
        self._advance = advance

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k, v [T, H, D] and attend with q [T, Hq, D] -> [T, Hq, D]."""
        self._store.write(self._cells[layer], k.flatten(0, 1), v.flatten(0, 1))
        if self._memory is not None:
            ring, remembered = self._memory
            ring.write(layer, remembered, q)
        if len(self._groups) == 1:
            return self._group(layer, self._groups[0], q)
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.tokens] = self._group(layer, group, q[group.tokens])
        return out

    def _group(self, layer: int, group: Group, q: Tensor) -> Tensor:
        rows = q.reshape(*group.q_pos.shape, *q.shape[1:])  # [B, M, Hq, D]
        store = self._store
        table, lengths = group.table[layer], group.lengths[layer]
        out = self._attend(rows, store.k, store.v, store.pos, table, lengths, group.q_pos)
        return out.reshape(q.shape)

    def finish(self) -> None:
        """Every layer has run: the cells count from now on. Call it once."""
        if self._memory is not None:
            ring, remembered = self._memory
            ring.commit(remembered)
        self._advance()


def plan_step(
    parts: Parts, rows: Rows
) -> tuple[Tensor, list[Group], tuple[QueryRing, Remembered] | None]:
    """Where the rows' tokens go: cells [L, T * H], groups, and who is remembered. Positions of the
    new cells, which no layer changes, are written here."""
    tables, store, ring = parts.tables, parts.store, parts.ring
    device = store.k.device
    first = np.cumsum(rows.counts) - rows.counts  # [R] each row's first token
    owner = np.repeat(np.arange(len(rows.slots)), rows.counts)  # [T]
    offset = np.arange(len(owner)) - first[owner]
    pos = rows.starts[owner] + offset
    cells = tables.cells(rows.slots[owner], offset).transpose(1, 0, 2)  # [L, T, H]
    flat = torch.from_numpy(np.ascontiguousarray(cells).reshape(len(cells), -1)).to(device)
    token_pos = torch.from_numpy(pos.astype(np.int32)).to(device)[:, None]
    store.write_pos(flat.view(-1), token_pos.expand(cells.shape).reshape(-1))
    memory = None
    if ring is not None:
        points = np.asarray(tables.point)[rows.slots]
        remembered = ring.select(rows.slots[owner], pos, points[owner])
        memory = None if remembered is None else (ring, remembered)
    return flat, _groups(tables, rows, first, device), memory


def _groups(tables: Tables, rows: Rows, first: Array, device: torch.device) -> list[Group]:
    single = np.flatnonzero(rows.counts == 1)
    members = [single] if single.size else []
    members += [np.array([row]) for row in np.flatnonzero(rows.counts > 1)]
    return [_group(tables, rows, first, chosen, device, len(members) == 1) for chosen in members]


def _group(
    tables: Tables, rows: Rows, first: Array, chosen: Array, device: torch.device, alone: bool
) -> Group:
    slots, span = rows.slots[chosen], np.arange(rows.counts[chosen[0]])
    lengths = tables.length[slots] + rows.counts[chosen, None, None].astype(np.int32)  # [B, L, H]
    width = -(-int(lengths.max()) // PAGE)
    table = tables.table[slots, :, :, :width]  # [B, L, H, P]

    def upload(array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    tokens = (first[chosen, None] + span).reshape(-1)
    return Group(
        None if alone else upload(tokens),
        upload(table.transpose(1, 0, 2, 3)),
        upload(lengths.transpose(1, 0, 2)),
        upload((rows.starts[chosen, None] + span).astype(np.int32)),
    )
