"""What a cache is made of, handed together to the functions that work on all of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.format import Cells, CellStore
from engine.cache.groups import Groups
from engine.cache.packed_store import PackedStore
from engine.cache.pages import PAGE, Ints, PagePool
from engine.cache.prefix import PrefixCache
from engine.cache.ring import QueryRing
from engine.cache.tables import Index, Tables
from engine.kernels.packed import PACK


class PackedParts(NamedTuple):
    """What a packed format has beside its plain pages."""

    groups: Groups
    store: PackedStore
    pool: PagePool
    prefix: PrefixCache


class Parts(NamedTuple):
    """One model's cache, in pieces.

    Cells of both kinds have one address: a packed cell its flat one, a plain cell that of its pool
    behind all packed ones.
    """

    tables: Tables
    store: CellStore
    pool: PagePool
    prefix: PrefixCache
    ring: QueryRing | None  # where the policy remembers queries
    packed: PackedParts | None

    @property
    def plain_base(self) -> int:
        """The address of the first plain cell."""
        return 0 if self.packed is None else self.packed.pool.pages * PACK

    def held(self, slot: int) -> Ints:
        """Cells of each head, [L, H]."""
        plain = self.tables.length[slot]
        return plain.copy() if self.packed is None else plain + self.packed.groups.cells(slot)

    def addresses(self, slot: int, layers: Index | int) -> tuple[NDArray[np.int64], Ints]:
        """Of some layers [S], or of one: each head's cells in order, [S, H, N], any cell past its
        own; and its packed ones [S, H]."""
        tables, length = self.tables, self.tables.length[slot, layers]
        packed = np.zeros_like(length)
        if self.packed is not None:
            groups = self.packed.groups
            packed = groups.cells(slot)[layers]
        heads, at = np.arange(length.shape[-1])[:, None], np.asarray(layers)[..., None, None]
        index = np.arange(int((packed + length).max())) - packed[..., None]  # of the plain ones
        plain = tables.layer_cells(slot, at, heads, index.clip(0, tables.width * PAGE - 1))
        found = plain + self.plain_base
        if self.packed is not None:
            inside = np.arange(PACK) < groups.fill[slot, layers][..., None]  # [S, H, G, 64]
            pages = groups.table[slot, layers].astype(np.int64)[..., None] * PACK
            found[index < 0] = (pages + np.arange(PACK))[inside]
        return found, packed

    def read(self, addresses: NDArray[np.int64]) -> Cells:
        """Cells of any kind, [N]; float32 where there are packed ones."""
        where = self._upload(addresses)
        if self.packed is None:
            return self.store.read(where)
        base, dim = self.plain_base, self.store.k.shape[2]
        from_packed = where < base
        k, v = (torch.empty(len(where), dim, device=where.device) for _ in range(2))
        pos = torch.empty(len(where), dtype=torch.int32, device=where.device)
        bias = None if self.store.bias is None else torch.empty(len(where), device=where.device)
        packed = self.packed.store.read(where[from_packed])
        plain = self.store.read(where[~from_packed] - base)
        for chosen, cells in ((from_packed, packed), (~from_packed, plain)):
            k[chosen], v[chosen], pos[chosen] = cells.k.float(), cells.v.float(), cells.pos
            if bias is not None and cells.bias is not None:
                bias[chosen] = cells.bias
        return Cells(k, v, pos, bias)

    def read_pos(self, addresses: NDArray[np.int64]) -> Ints:
        """Positions of cells, in any shape."""
        where, base = self._upload(addresses), self.plain_base
        pos = self.store.pos.view(-1)[(where - base).clamp(min=0)]
        if self.packed is not None:
            packed = self.packed.store.pos.view(-1)
            pos = torch.where(where < base, packed[where.clamp(max=base - 1)], pos)
        return np.asarray(pos.cpu().numpy())

    def _upload(self, addresses: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(addresses).to(self.store.k.device)
