"""What a cache's pages and slots cost, and how its bytes are split between its pools."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.cache.format import CellStore, KVFormat
from engine.cache.groups import Groups
from engine.cache.pages import PAGE, Ints
from engine.cache.policy import KVSpec
from engine.cache.ring import QueryRing
from engine.cache.tables import Tables, pages_for
from engine.cache.view import KVShape
from engine.kernels.packed import PACK


class KVStats(NamedTuple):
    """What the cache holds now, and what it has done. `packed_*` are of a packed format's other
    pages."""

    pages: int
    used_pages: int  # referred to by slots
    free_pages: int
    prefix_pages: int  # kept for prompts to come, and evictable
    page_bytes: int  # of keys, values and positions
    peak_pages: int  # most that slots referred to at once
    packed_pages: int
    used_packed_pages: int
    free_packed_pages: int
    prefix_packed_pages: int
    packed_page_bytes: int  # of codes, grids and positions
    used_bytes: int  # of pages of both kinds
    peak_bytes: int
    side_bytes: int  # what isn't cells: biases of all pages, tables and query rings of all slots
    used_side_bytes: int  # of the pages and slots in use
    evicted_cells: int
    compaction_seconds: float  # on the host's clock


class PoolPages(NamedTuple):
    """Pages of each pool."""

    plain: int
    packed: int


class Sizes(NamedTuple):
    """Of one model's cache; `dtype` is the model's."""

    shape: KVShape
    spec: KVSpec
    dtype: torch.dtype

    @property
    def format(self) -> KVFormat:
        return self.spec.cells(self.dtype)

    @property
    def page_bytes(self) -> int:
        """Cells of one plain page."""
        return self.format.page_bytes(self.shape.head_dim)

    @property
    def packed_page_bytes(self) -> int:
        """Cells of one packed page."""
        return self.format.packed_page_bytes(self.shape.head_dim)

    @property
    def page_side_bytes(self) -> int:
        return CellStore.page_side_bytes(self.spec.bias)

    @property
    def packed_page_side_bytes(self) -> int:
        return self.page_side_bytes * (PACK // PAGE)

    @property
    def token_bytes(self) -> float:
        """One token in every head of every layer, all told: packed, where the format packs."""
        heads = self.shape.layers * self.shape.kv_heads
        if self.format.bits:
            return heads * (self.packed_page_bytes + self.packed_page_side_bytes) / PACK
        return heads * (self.page_bytes + self.page_side_bytes) / PAGE

    def plain_cells(self, max_len: int) -> int:
        """Plain cells that a head holds at most."""
        return min(self.format.tail_cells, max_len) if self.format.bits else max_len

    def slot_bytes(self, max_len: int) -> int:
        """A slot's side state: its tables, and the queries that its policy remembers."""
        tables = Tables.slot_bytes(self.shape, self.plain_cells(max_len))
        if self.format.bits:
            tables += Groups.slot_bytes(self.shape, max_len)
        return tables + QueryRing.slot_bytes(self.shape, self.spec.queries, self.dtype)

    def tail_bytes(self, max_len: int) -> int:
        """The plain pages of a sequence whose other cells are packed; 0 of plain formats."""
        if not self.format.bits:
            return 0
        return self._tail_pages(max_len) * (self.page_bytes + self.page_side_bytes)

    def _tail_pages(self, max_len: int) -> int:
        heads = self.shape.layers * self.shape.kv_heads
        return heads * -(-self.plain_cells(max_len) // PAGE)

    def tails(self, nbytes: float, slots: int, max_len: int) -> int:
        """For how many sequences at once such a cache has plain tails: as many as fit with their
        packed cells, where a bounded one holds budget and window, and another a quarter of its
        longest."""
        if not self.format.bits:
            return 0
        spec = self.spec
        bounded = spec.policy is not None and spec.policy.bounded
        cells = min(spec.budget + spec.window, max_len) if bounded else -(-max_len // 4)
        each = self.tail_bytes(max_len) + cells * self.token_bytes
        return max(1, min(slots, int(nbytes / each)))

    def pages(self, tokens: int, tails: int, max_len: int) -> PoolPages:
        """Of a cache that holds so many tokens uncompressed, and tails of so many sequences."""
        heads = self.shape.layers * self.shape.kv_heads
        if not self.format.bits:
            return PoolPages(tokens // PAGE * heads, 0)
        return PoolPages(tails * self._tail_pages(max_len), -(-tokens // PACK) * heads)


class SlotUse(NamedTuple):
    """What one slot holds; `slot_bytes` is its side state beside its pages'."""

    plain: Ints  # [L, H] cells in plain pages
    packed: Ints  # [L, H] cells in packed ones
    packed_pages: int
    slot_bytes: int
    sizes: Sizes

    def grown(self, tokens: int) -> SlotUse:
        """With so many tokens more: what it held before a compaction, or packing, after them."""
        return self._replace(plain=self.plain + tokens)

    @property
    def cells(self) -> Ints:
        """Of each head, [L, H]."""
        return self.plain + self.packed

    @property
    def cell_bytes(self) -> int:
        """Of its pages, of both kinds."""
        sizes = self.sizes
        return self._pages * sizes.page_bytes + self.packed_pages * sizes.packed_page_bytes

    @property
    def side_bytes(self) -> int:
        """What isn't cells: biases, tables, remembered queries."""
        sizes = self.sizes
        pages = self._pages * sizes.page_side_bytes
        return self.slot_bytes + pages + self.packed_pages * sizes.packed_page_side_bytes

    @property
    def _pages(self) -> int:
        return int(pages_for(self.plain).sum())
