"""Pages for tokens to come: taken before they run, and copied where others see them too."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cache.admission import Ledger
from engine.cache.pages import PAGE, Ints
from engine.cache.parts import PackedParts, Parts
from engine.cache.tables import Tables, pages_for

Where = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]


def make_room(parts: Parts, ledger: Ledger, slot: int, end: int) -> int:
    """Take pages for the slot's tokens up to `end`, or as many as it may have; the new end."""
    tables, pool = parts.tables, parts.pool
    start, length = tables.computed[slot], tables.length[slot]
    tails = tables.tails(slot)
    shared = pool.refs[tables.table[slot][tails]] > 1
    copies = int(np.count_nonzero(shared))
    # Where a shared page counts for each, its copy was counted when it was shared.
    room = ledger.room(slot) - (copies if ledger.shares else 0)

    def wanted(tokens: int) -> Ints:
        return np.maximum(pages_for(length + tokens), tables.taken[slot])

    def lacks(tokens: int) -> bool:
        return int(wanted(tokens).sum()) - tables.held_pages[slot] > room

    # lacks(1..end - start) is False, ..., False, True, ...: run what comes before the first True
    tokens = bisect_left(range(1, end - start + 1), True, key=lacks)
    if tokens == 0:
        return start
    taken = wanted(tokens)
    new = parts.prefix.take(copies + int(taken.sum()) - tables.held_pages[slot])
    if copies:
        layers, heads, columns = (axis[shared] for axis in tails)
        _copy(parts, slot, (layers, heads, columns), new[:copies])
        ledger.copied(slot, copies)
    tables.set_taken(slot, taken, new[copies:])
    tables.ready[slot] = start + int((taken * PAGE - length).min())
    return start + tokens


def pack_room(packed: PackedParts, ledger: Ledger, tables: Tables, slot: int, end: int) -> int:
    """Take the packed pages that the slot's plain cells go to if it packs at `end`; the new end:
    one less where there are none."""
    groups = packed.groups
    plain = tables.length[slot] + (end - tables.computed[slot])
    taken = np.maximum(groups.count(slot) + groups.ahead(plain), groups.taken[slot])
    more = int(taken.sum()) - groups.held_pages[slot]
    if more > ledger.room(slot):
        return end - 1
    if more:
        groups.set_taken(slot, taken, packed.prefix.take(more))
    return end


def _copy(parts: Parts, slot: int, where: Where, new: Ints) -> None:
    """Copy on write of the pages at `where` in the slot's table."""
    table, device = parts.tables.table[slot], parts.store.k.device
    old = table[where]
    src, dst = (torch.from_numpy(ids.astype(np.int64)).to(device) for ids in (old, new))
    parts.store.copy(src, dst)
    parts.pool.drop(old)
    table[where] = new
