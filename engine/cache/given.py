"""The rows that a compaction gives, by the addresses of the cells that they replace."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.format import Cells
from engine.cache.view import Compaction

Where = tuple[NDArray[np.intp], ...]


class Given(NamedTuple):
    """Made of a compaction once, asked for whatever cells are written anew."""

    done: Compaction
    addresses: NDArray[np.int64]  # [N] ascending
    where: Where  # [N] each: rows, heads and places in `done`

    @classmethod
    def of(cls, done: Compaction, addresses: NDArray[np.int64], where: Where) -> Given:
        order = np.argsort(addresses)
        return cls(done, addresses[order], tuple(axis[order] for axis in where))

    @property
    def replaces(self) -> bool:
        return self.done.k is not None or self.done.v is not None

    def touches(self, addresses: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which cells get something of it."""
        gives = self.replaces or self.done.bias is not None
        if not gives or not self.addresses.size:
            return np.zeros(addresses.shape, dtype=np.bool_)
        at = np.searchsorted(self.addresses, addresses).clip(max=self.addresses.size - 1)
        return np.asarray(self.addresses[at] == addresses)

    def put(self, cells: Cells, addresses: NDArray[np.int64]) -> Cells:
        at = np.flatnonzero(self.touches(addresses))
        if not at.size:
            return cells
        found = np.searchsorted(self.addresses, addresses[at])
        device = cells.k.device
        index = torch.from_numpy(at).to(device)
        where = tuple(torch.from_numpy(axis[found]).to(device) for axis in self.where)

        def put(own: Tensor, given: Tensor | None) -> Tensor:
            if given is None:
                return own
            return own.index_copy(0, index, given[where].to(own.dtype))

        bias = None if cells.bias is None else put(cells.bias, self.done.bias)
        return cells._replace(k=put(cells.k, self.done.k), v=put(cells.v, self.done.v), bias=bias)
