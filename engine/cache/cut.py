"""Cells off a slot's end."""

from __future__ import annotations

import numpy as np
import torch

from engine.cache.admission import Ledger
from engine.cache.pages import PAGE
from engine.cache.parts import PackedParts, Parts
from engine.cache.tables import pages_for
from engine.kernels.packed import PACK


def cut_off(parts: Parts, ledger: Ledger, slot: int, count: int) -> bool:
    """Drop each head's last cells. False where that takes plain pages that aren't there: then too
    many are gone, and the slot must be emptied.

    Cells of a packed page that goes only partly become plain ones, with the values that they have:
    so no page but a compaction's is partly filled, however often a slot goes back.
    """
    tables = parts.tables
    length = tables.length[slot]
    beyond = np.maximum(count - length, 0)  # [L, H] of them packed
    tables.length[slot] = np.maximum(length - count, 0)
    parts.pool.drop(tables.shrink(slot, pages_for(tables.length[slot])))
    return parts.packed is None or _cut_packed(parts, parts.packed, ledger, slot, beyond)


def _cut_packed(
    parts: Parts,
    packed: PackedParts,
    ledger: Ledger,
    slot: int,
    beyond: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
) -> bool:
    tables, groups = parts.tables, packed.groups
    layers, heads, columns, kept = groups.cut(slot, beyond)
    pages = groups.table[slot, layers, heads, columns].astype(np.int64)
    packed.pool.drop(groups.shrink(slot))
    taken = tables.taken[slot].copy()
    taken[layers, heads] = -(-kept // PAGE)
    more = int(taken.sum()) - tables.held_pages[slot]
    if more > ledger.room(slot):
        return False
    if more:
        which, at = np.nonzero(np.arange(PACK) < kept[:, None])
        cells = parts.read(pages[which] * PACK + at)
        tables.set_taken(slot, taken, parts.prefix.take(more))
        tables.length[slot, layers, heads] = kept
        page = tables.table[slot, layers[which], heads[which], at // PAGE].astype(np.int64)
        to = torch.from_numpy(page * PAGE + at % PAGE).to(parts.store.k.device)
        parts.store.write(to, cells.k, cells.v)
        parts.store.write_pos(to, cells.pos)
        if cells.bias is not None:
            parts.store.write_bias(to, cells.bias)
    return True
