"""The last queries of each slot, for policies that score cells by attention.

Only those that the next compaction will read are written: of its last W positions. A position's
row is position % W.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.view import KVShape
from engine.kernels.memory import zeros

Positions = NDArray[np.int64]


class Remembered(NamedTuple):
    """Which tokens of a step are remembered, and where."""

    tokens: Tensor  # [K] rows of the step's q
    rows: Tensor  # [K] of a layer's ring, flat
    slots: Positions  # [K]
    pos: Positions  # [K]


class QueryRing:
    """Queries [layers, slots, W, Hq, D] after their rotation, and their positions, -1: none."""

    def __init__(
        self, shape: KVShape, window: int, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        size = (shape.layers, slots, window, shape.q_heads, shape.head_dim)
        self.window = window
        self.data = zeros(size, dtype, device)
        self._pos: Positions = np.full((slots, window), -1, dtype=np.int64)

    @staticmethod
    def slot_bytes(shape: KVShape, window: int, dtype: torch.dtype) -> int:
        return shape.layers * window * (shape.q_heads * shape.head_dim * dtype.itemsize + 8)

    def select(self, slots: Positions, pos: Positions, ends: Positions) -> Remembered | None:
        """Which of a step's tokens [T] are among the last W before `ends`."""
        tokens = np.flatnonzero(pos >= ends - self.window)
        if not tokens.size:
            return None
        slots, pos, device = slots[tokens], pos[tokens], self.data.device
        # No row goes past its end: at most W of it are selected, and the ring's rows are distinct.
        rows = torch.from_numpy(slots * self.window + pos % self.window).to(device)
        return Remembered(torch.from_numpy(tokens).to(device), rows, slots, pos)

    def write(self, layer: int, remembered: Remembered, q: Tensor) -> None:
        """Copy the remembered of q [T, Hq, D]."""
        flat = self.data[layer].flatten(0, 1)
        flat.index_copy_(0, remembered.rows, q[remembered.tokens].to(flat.dtype))

    def commit(self, remembered: Remembered) -> None:
        """Every layer has written them."""
        self._pos[remembered.slots, remembered.pos % self.window] = remembered.pos

    def forget(self, slot: int, pos: int) -> None:
        """Queries of positions from `pos` on are gone."""
        self._pos[slot][self._pos[slot] >= pos] = -1

    def copy(self, slot: int, child: int) -> None:
        self._pos[child] = self._pos[slot]
        if (self._pos[slot] >= 0).any():
            self.data[:, child] = self.data[:, slot]

    def read(self, layers: NDArray[np.int64], slot: int) -> tuple[Tensor, Tensor]:
        """Queries [S, W, Hq, D] and positions [S, W] of some layers, ascending, absent first."""
        order = np.argsort(self._pos[slot], kind="stable")
        device = self.data.device
        pos = torch.from_numpy(self._pos[slot][order]).to(device).expand(len(layers), -1)
        rows, columns = (torch.from_numpy(x).to(device) for x in (layers[:, None], order))
        return self.data[rows, slot, columns], pos
