"""Prompts' cells that are there already: found, shared, and remembered for others.

What a prompt finds must be what it would compute itself. Of a packed format that is the packed
pages and the plain tail that stand at one position, so both are kept: a page is remembered as a
plain one when its cells are new, and their group once it is packed. Where a slot was cut off within
packed cells, its later ones differ, and nobody may have them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.cache.groups import Groups
from engine.cache.pages import PAGE, Ints
from engine.cache.parts import Parts
from engine.kernels.packed import PACK

EACH = PACK // PAGE


class Hit(NamedTuple):
    """A prompt's first `tokens`: its packed pages and the plain ones behind them, [L * H, n]."""

    tokens: int
    groups: Ints
    plain: Ints

    def shared(self, parts: Parts) -> list[int]:
        """How many pages of each pool are used by others anyway."""
        pools = [parts.pool, *([] if parts.packed is None else [parts.packed.pool])]
        found = zip(pools, (self.plain, self.groups), strict=False)
        return [int(np.count_nonzero(pool.refs[pages] > 1)) for pool, pages in found]


def find(parts: Parts, keys: list[bytes], most: int) -> Hit:
    """The longest known prefix of at most so many tokens."""
    pages = min(len(keys), max(most, 0) // PAGE)
    if parts.packed is None:
        run = parts.prefix.match(keys[:pages])
        return Hit(len(run) * PAGE, _stacked([]), _stacked(run))
    tail = parts.packed.groups.tail
    groups = parts.packed.prefix.match(keys[EACH - 1 : pages : EACH])
    for count in range(pages, 0, -1):
        packed = Groups.packed_of(count * PAGE, tail)
        if packed > len(groups):
            continue
        plain = parts.prefix.match(keys[packed * EACH : count])
        if len(plain) == count - packed * EACH:
            return Hit(count * PAGE, _stacked(groups[:packed]), _stacked(plain))
    return Hit(0, _stacked([]), _stacked([]))


def _stacked(pages: list[Ints]) -> Ints:
    return np.stack(pages, axis=-1) if pages else np.empty((0, 0), np.int32)


def adopt(parts: Parts, slot: int, keys: list[bytes], hit: Hit) -> None:
    """The empty slot has the hit's pages."""
    tables, packed = parts.tables, 0
    if parts.packed is not None:
        groups, packed = parts.packed.groups, hit.groups.shape[-1]
        parts.packed.prefix.touch(keys[EACH - 1 :: EACH][:packed])
        parts.packed.pool.share(hit.groups)
        groups.set_taken(slot, np.full_like(groups.taken[slot], packed), hit.groups.reshape(-1))
        groups.fill[slot][..., :packed] = PACK
        groups.renew(slot, 0, hit.tokens)
    count = hit.plain.shape[-1]
    parts.prefix.touch(keys[packed * EACH :][:count])
    parts.pool.share(hit.plain)
    tables.set_taken(slot, np.full_like(tables.taken[slot], count), hit.plain.reshape(-1))
    tables.length[slot] = count * PAGE
    tables.computed[slot] = tables.ready[slot] = hit.tokens


def remember(parts: Parts, slot: int, keys: list[bytes]) -> None:
    """The slot's plain pages of its prompt, none of which was evicted."""
    tables, first = parts.tables, 0
    if parts.packed is not None:
        first = int(parts.packed.groups.count(slot)[0, 0]) * EACH
    keys = keys[first : tables.computed[slot] // PAGE]
    parts.prefix.insert(keys, tables.table[slot].reshape(-1, tables.width))


def remember_packed(parts: Parts, slot: int, keys: list[bytes]) -> None:
    """And its packed ones."""
    assert parts.packed is not None
    groups = parts.packed.groups
    count = int(groups.count(slot)[0, 0])
    own = keys[EACH - 1 :: EACH][:count]
    parts.packed.prefix.insert(own, groups.table[slot].reshape(-1, groups.width))


def as_computed(parts: Parts, slot: int) -> bool:
    """Whether a slot that was cut off holds what it would if it had only come so far."""
    if parts.packed is None:
        return True
    groups = parts.packed.groups
    packed = Groups.packed_of(parts.tables.computed[slot], groups.tail)
    return bool((groups.cells(slot) == packed * PACK).all())
