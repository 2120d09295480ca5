"""Invariants that tie tables to pools and prefixes; tests assert them after every step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from engine.cache.pages import PAGE
from engine.cache.parts import PackedParts, Parts
from engine.cache.tables import pages_for
from engine.kernels.packed import PACK


def check_plain(parts: Parts, slots: Iterable[int]) -> None:
    tables, pool = parts.tables, parts.pool
    pool.check()
    parts.prefix.check()
    refs = pool.kept.astype(np.int32)
    for slot in slots:
        used = tables.used(slot)
        assert used.size == np.unique(used).size == tables.held_pages[slot]
        refs[used] += 1
        assert (tables.taken[slot] >= pages_for(tables.length[slot])).all()
        assert tables.length[slot].max() <= tables.width * PAGE
        assert tables.ready[slot] >= tables.computed[slot]
        assert tables.compacted_at[slot] < tables.early[slot] <= tables.point[slot]
        assert tables.point[slot] <= tables.limit[slot]
    assert np.array_equal(refs, pool.refs), "references"


def check_packed(parts: Parts, packed: PackedParts, slots: Iterable[int]) -> None:
    groups, pool, tables = packed.groups, packed.pool, parts.tables
    pool.check()
    packed.prefix.check()
    refs = pool.kept.astype(np.int32)
    for slot in slots:
        used = groups.used(slot)
        assert used.size == np.unique(used).size == groups.held_pages[slot]
        refs[used] += 1
        fill, count = groups.fill[slot], groups.count(slot)
        assert (groups.taken[slot] >= count).all()
        assert ((fill > 0) == (np.arange(groups.width) < count[..., None])).all(), "gaps"
        assert fill.max(initial=0) <= PACK
        assert (count <= -(-groups.cells(slot) // PACK) + 1).all(), "pages that hold little"
        if not tables.compacted_at[slot]:
            assert (fill[fill > 0] == PACK).all(), "only a compaction leaves a page partly filled"
        assert (groups.at[slot] - tables.compacted_at[slot]) % PACK == 0
        assert tables.computed[slot] <= groups.at[slot] <= tables.computed[slot] + PACK
    assert np.array_equal(refs, pool.refs), "references of packed pages"
