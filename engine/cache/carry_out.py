"""What a policy decided of a piece becomes tables and cells: gaps close, pages come free.

Packed pages first, whose cells are a head's first ones; the rest moves up behind them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cache.format import Cells
from engine.cache.given import Given
from engine.cache.pages import PAGE, Ints
from engine.cache.parts import PackedParts, Parts
from engine.cache.pieces import Piece
from engine.cache.repack import packed_sources, rewrite
from engine.cache.tables import pages_for
from engine.cache.view import Compaction

Bools = NDArray[np.bool_]

Read = Callable[[NDArray[np.int64]], Cells]
"""Cells by address."""


def carry_out(parts: Parts, slot: int, piece: Piece, done: Compaction) -> None:
    """Change the cells of a piece's layers; others aren't touched."""
    first, count = piece.first[..., None], piece.packed[..., None]  # [S, H, 1]
    index = np.arange(piece.where.shape[-1])
    offered = (index >= first) & (index < first + piece.cells[..., None])
    stays = ~offered & (index < piece.held[..., None])  # [S, H, N]
    keep = done.keep.cpu().numpy()  # [S, H, M]
    rows, heads, places = chosen = np.nonzero(keep >= 0)
    kept = rows, heads, piece.first[rows, heads] + keep[chosen]
    stays[kept] = True
    given = Given.of(done, piece.where[kept], (rows, heads, places))

    def read(addresses: NDArray[np.int64]) -> Cells:
        return given.put(parts.read(addresses), addresses)

    if parts.packed is not None:
        for row in np.flatnonzero(piece.packed.any(-1)):
            own = stays[row][index < count[row]]
            _take_out(parts, parts.packed, slot, int(piece.layers[row]), own, given, read)
    plain = piece.held - piece.packed  # [S, H]
    left = np.arange(int(plain.max()))
    behind = np.take_along_axis(stays, (left + count).clip(max=len(index) - 1), -1)
    behind &= left < plain[..., None]
    _close_gaps(parts, slot, piece.layers, behind, np.maximum(piece.first - piece.packed, 0), read)


def _take_out(
    parts: Parts,
    packed: PackedParts,
    slot: int,
    layer: int,
    stays: Bools,
    given: Given,
    read: Read,
) -> None:
    """One layer's packed cells, of which `stays` [n] says which do."""
    sources = packed_sources(packed, slot, layer)
    touched = given.touches(sources.cells) & sources.stays
    before = sources.stays.copy()
    sources.stays[before] = stays
    sources.worn[:] = ((before & ~sources.stays) | touched).any(2)
    sources.anew[:] = touched.any(2) & given.replaces
    if sources.worn.any():
        rewrite(parts, packed, slot, layer, sources, read)


def _close_gaps(
    parts: Parts, slot: int, layers: NDArray[np.int64], stays: Bools, first: Ints, read: Read
) -> None:
    """Of each head's plain cells [S, H, N], move those that stay up, from the page of the `first`
    [S, H] on offer on. Pages are let go before others are taken, so it never needs more than the
    slot has; a shared one is left to its other users."""
    tables, store = parts.tables, parts.store
    moved = stays & (np.arange(stays.shape[-1]) >= first[..., None] // PAGE * PAGE)
    rows, heads, index = np.nonzero(moved)
    src = tables.layer_cells(slot, layers[rows], heads, index)
    cells = read(src + parts.plain_base)
    length = stays.sum(-1, dtype=np.int32)  # [S, H]
    _exchange(parts, slot, layers, first // PAGE, pages_for(length))
    rank = (stays.cumsum(-1) - 1)[moved]
    dst = tables.layer_cells(slot, layers[rows], heads, rank)
    where = torch.from_numpy(dst).to(store.k.device)
    store.write(where, cells.k, cells.v)
    store.write_pos(where, cells.pos)
    if cells.bias is not None:
        store.write_bias(where, cells.bias)
    tables.length[slot, layers] = length


def _exchange(parts: Parts, slot: int, layers: NDArray[np.int64], first: Ints, taken: Ints) -> None:
    """Drop each head's pages from `first` [S, H] on and take what `taken` [S, H] pages need."""
    tables = parts.tables
    table, old = tables.table[slot, layers], tables.taken[slot, layers]  # [S, H, P], [S, H]
    columns = np.arange(table.shape[-1])
    after = columns >= first[..., None]
    parts.pool.drop(table[after & (columns < old[..., None])])
    fresh = after & (columns < taken[..., None])
    table[fresh] = parts.prefix.take(int(fresh.sum()))
    tables.table[slot, layers], tables.taken[slot, layers] = table, taken
