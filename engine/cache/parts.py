"""What a cache is made of, handed together to the functions that work on all of it."""

from __future__ import annotations

from typing import NamedTuple

from engine.cache.format import CellStore
from engine.cache.pages import PagePool
from engine.cache.prefix import PrefixCache
from engine.cache.ring import QueryRing
from engine.cache.tables import Tables


class Parts(NamedTuple):
    """One model's cache, in pieces."""

    tables: Tables
    store: CellStore
    pool: PagePool
    prefix: PrefixCache
    ring: QueryRing | None  # where the policy remembers queries
