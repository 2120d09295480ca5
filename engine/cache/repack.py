"""Packed pages anew: plain cells that become packed ones, and pages that lost cells.

A page that lost some keeps its grids and the codes of the rest, which costs no precision, but no
page comes free by it. So where a head's pages exceed what its packed cells need by more than one,
the cells of its last pages are packed anew, as few pages as it takes: a number that was rounded
before is rounded once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.format import Cells
from engine.cache.pages import PAGE, Ints
from engine.cache.parts import PackedParts, Parts
from engine.kernels.packed import PACK

Bools = NDArray[np.bool_]


class Sources(NamedTuple):
    """A head's groups of cells in order, [H, C] of 64: its packed pages, and plain cells to join
    them. What is no page's is `fresh`; pages `anew` are packed again whatever they lost."""

    pages: Ints  # [H, C]
    cells: NDArray[np.int64]  # [H, C, 64] addresses
    stays: Bools  # [H, C, 64]
    fresh: Bools  # [H, C]
    anew: Bools  # [H, C], the fresh ones too
    worn: Bools  # [H, C]: pages that can't stay as they are, the ones `anew` too

    def reordered(self) -> Sources:
        """With groups that lose all their cells at the end."""
        order = np.argsort(~self.stays.any(-1), axis=1, kind="stable")

        def moved(array: NDArray[Any]) -> NDArray[Any]:
            index = order if array.ndim == 2 else order[..., None]
            return np.take_along_axis(array, index, 1)

        return Sources(*(moved(array) for array in self))


def packed_from(left: Ints, groups: Ints) -> Ints:
    """From which of its groups on a head's cells are packed anew, [H]: as late as the bound on its
    pages allows. left [H, C]: cells that stay, those of `groups` [H] groups."""
    behind = np.zeros((left.shape[0], left.shape[1] + 1), dtype=left.dtype)
    behind[:, :-1] = left[:, ::-1].cumsum(1)[:, ::-1]  # [H, C + 1] from each group on
    first = np.arange(behind.shape[1])
    pages = first + -(-behind // PACK)
    allowed = -(-behind[:, :1] // PACK) + 1
    fits = (pages <= allowed) & (first <= groups[:, None])
    return (behind.shape[1] - 1 - fits[:, ::-1].argmax(1)).astype(np.int32)


def rewrite(
    parts: Parts,
    packed: PackedParts,
    slot: int,
    layer: int,
    sources: Sources,
    read: Callable[[NDArray[np.int64]], Cells],
) -> None:
    """Make one layer's packed pages of what stays. `read` gives cells by address."""
    groups, pool = packed.groups, packed.pool
    src = sources.reordered()
    left = src.stays.sum(2, dtype=np.int32)  # [H, C]
    count = (left > 0).sum(1)
    first = packed_from(left, count)[:, None]
    column = np.arange(left.shape[1])
    own = (column < first) & (left > 0)  # groups that keep a page to themselves
    kept = own & ~src.worn
    behind = left * (column >= first)
    before = behind.cumsum(1) - behind  # [H, C] cells that are packed anew, of earlier groups
    rank = src.stays.cumsum(2) - 1
    joined = before[..., None] + rank
    target = np.where(own[..., None], column[:, None], first[..., None] + joined // PACK)
    offset = np.where(own[..., None], rank, joined % PACK)
    fill = np.zeros((len(left), max(groups.width, left.shape[1])), dtype=np.int32)
    np.add.at(fill, (np.nonzero(src.stays)[0], target[src.stays]), 1)
    table = np.zeros_like(fill)
    table[:, : left.shape[1]][kept] = src.pages[kept]
    made = fill > 0
    made[:, : left.shape[1]] &= ~kept

    moved = src.stays & ~kept[..., None]
    heads = np.nonzero(moved)[0]
    cells = read(src.cells[moved])
    shrunk = own & src.worn & ~src.anew
    h, c = np.nonzero(shrunk)
    order = np.argsort(~src.stays[h, c], axis=1, kind="stable")
    device = parts.store.k.device
    codes = packed.store.rearranged(_ids(src.pages[h, c], device), _ids(order, device))

    taken = groups.table[slot, layer][np.arange(groups.width) < groups.taken[slot, layer][:, None]]
    pool.drop(np.setdiff1d(taken, src.pages[kept]))
    table[made] = packed.prefix.take(int(made.sum()))
    at = np.full(fill.shape, -1)
    at[made] = np.arange(made.sum())
    page, place = at[heads, target[moved]], offset[moved]
    _write(packed, _ids(table[made], device), fill[made], page, place, cells, at[h, c])
    packed.store.write_codes(_ids(table[h, c], device), codes)
    groups.table[slot, layer] = table[:, : groups.width]
    groups.fill[slot, layer] = fill[:, : groups.width]
    groups.taken[slot, layer] = (fill > 0).sum(1)


def _ids(ids: NDArray[np.signedinteger], device: torch.device) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(device)


def _write(
    packed: PackedParts,
    pages: Tensor,
    fill: Ints,
    page: NDArray[np.int64],
    place: NDArray[np.int64],
    cells: Cells,
    shrunk: NDArray[np.int64],
) -> None:
    """Cells go to places [N] of pages[page]; pages[shrunk] get their codes elsewhere."""
    device = pages.device
    at = (_ids(page, device), _ids(place, device))

    def spread(x: Tensor) -> Tensor:
        out = x.new_zeros(len(pages), PACK, *x.shape[1:])
        out[at] = x
        return out

    bias = None if cells.bias is None else spread(cells.bias)
    packed.store.write_side(pages, spread(cells.pos), bias)
    anew = _ids(np.setdiff1d(np.arange(len(pages)), shrunk), device)
    count = _ids(fill, device)[anew]
    packed.store.write(pages[anew], spread(cells.k)[anew], spread(cells.v)[anew], count)


def packed_sources(packed: PackedParts, slot: int, layer: int, extra: int = 0) -> Sources:
    """A layer's packed pages, all of whose cells stay, and room for `extra` fresh groups."""
    groups = packed.groups
    wide = int(groups.count(slot)[layer].max())
    pages = groups.table[slot, layer][:, :wide]
    heads = len(pages)
    fresh = np.broadcast_to(np.arange(wide + extra) >= wide, (heads, wide + extra)).copy()
    cells = np.zeros((heads, wide + extra, PACK), dtype=np.int64)
    cells[:, :wide] = pages.astype(np.int64)[..., None] * PACK + np.arange(PACK)
    stays = np.zeros(cells.shape, dtype=np.bool_)
    stays[:, :wide] = np.arange(PACK) < groups.fill[slot, layer][:, :wide, None]
    whole = np.pad(pages, ((0, 0), (0, extra)), constant_values=-1)
    return Sources(whole, cells, stays, fresh, fresh.copy(), fresh.copy())


def pack(parts: Parts, packed: PackedParts, slot: int) -> None:
    """Of each head's plain cells, whole groups of the oldest become packed ones, so long as the
    tail is left. They are whole pages, so the others stay where they are."""
    tables = parts.tables
    for layer, many in enumerate(packed.groups.ahead(tables.length[slot])):
        if many.any():
            _pack_layer(parts, packed, slot, layer, many)
    tables.held_pages[slot] = int(tables.taken[slot].sum())
    packed.groups.held_pages[slot] = int(packed.groups.taken[slot].sum())


def _pack_layer(parts: Parts, packed: PackedParts, slot: int, layer: int, many: Ints) -> None:
    tables, extra = parts.tables, int(many.max())
    sources = packed_sources(packed, slot, layer, extra)
    heads, index = np.arange(len(many))[:, None], np.arange(extra * PACK)
    plain = tables.layer_cells(slot, layer, heads, index.clip(max=tables.width * PAGE - 1))
    sources.cells[:, -extra:] = (plain + parts.plain_base).reshape(-1, extra, PACK)
    sources.stays[:, -extra:] = (np.arange(extra) < many[:, None])[..., None]
    rewrite(parts, packed, slot, layer, sources, parts.read)
    gone = many * (PACK // PAGE)  # pages
    table, columns = tables.table[slot, layer], np.arange(tables.width)
    parts.pool.drop(table[columns < gone[:, None]])
    shifted = (columns + gone[:, None]).clip(max=tables.width - 1)
    tables.table[slot, layer] = np.take_along_axis(table, shifted, 1)
    tables.taken[slot, layer] -= gone
    tables.length[slot, layer] -= many * PACK
