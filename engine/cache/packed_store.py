"""Packed pages: 64 cells of a head at 2, 4 or 8 bits (kernels/packed.py), in pools of their own.

A page that is written stays as it is. Cells are addressed flat: page * 64 + offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cache.format import Cells
from engine.kernels.memory import zeros
from engine.kernels.packed import (
    PACK,
    PackedCells,
    codes_of_keys,
    codes_of_values,
    keys_of_codes,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
    value_channels,
    values_of_codes,
)


class PackedStore:
    """The pools. Page ids and flat cells are int64 on the pools' device."""

    def __init__(
        self, pages: int, head_dim: int, bits: int, device: torch.device, bias: bool
    ) -> None:
        size, runs = head_dim * PACK * bits // 8, head_dim // value_channels(head_dim)
        self.bits = bits
        self.k = zeros((pages, size), torch.uint8, device)
        self.k_grid = zeros((pages, 2, head_dim), torch.float16, device)
        self.v = zeros((pages, size), torch.uint8, device)
        self.v_grid = zeros((pages, 2, runs, PACK), torch.float16, device)
        self.pos = zeros((pages, PACK), torch.int32, device)
        self.bias = zeros((pages, PACK), torch.float32, device) if bias else None

    def with_tables(self, table: Tensor, fill: Tensor) -> PackedCells:
        pools = self.k, self.k_grid, self.v, self.v_grid, self.pos, self.bias
        return PackedCells(*pools, table, fill)

    def write(self, pages: Tensor, k: Tensor, v: Tensor, count: Tensor) -> None:
        """k, v [n, 64, D], of which the first count [n] are there, become pages [n]."""
        self.k[pages], self.k_grid[pages] = pack_keys(k, count, self.bits)
        self.v[pages], self.v_grid[pages] = pack_values(v, count, self.bits)

    def write_side(self, pages: Tensor, pos: Tensor, bias: Tensor | None) -> None:
        """Positions and biases [n, 64]."""
        self.pos[pages] = pos
        if self.bias is not None and bias is not None:
            self.bias[pages] = bias

    def rearranged(self, pages: Tensor, order: Tensor) -> tuple[Tensor, ...]:
        """The pages [n] with their cells in another order [n, 64], every code on its own grid."""
        index = order[..., None]
        k = codes_of_keys(self.k[pages], self.bits)
        v = codes_of_values(self.v[pages], self.bits)
        grid = self.v_grid[pages]
        return (
            keys_of_codes(k.gather(1, index.expand_as(k)), self.bits),
            self.k_grid[pages],
            values_of_codes(v.gather(1, index.expand_as(v)), self.bits),
            grid.gather(3, order[:, None, None].expand_as(grid)),
        )

    def write_codes(self, pages: Tensor, parts: tuple[Tensor, ...]) -> None:
        """What `rearranged` gave, as pages [n]."""
        for pool, part in zip((self.k, self.k_grid, self.v, self.v_grid), parts, strict=True):
            pool[pages] = part

    def read(self, cells: Tensor) -> Cells:
        """Float32. Pages that any of the cells are in are unpacked whole."""
        pages, at = torch.unique(cells // PACK, return_inverse=True)
        flat = at * PACK + cells % PACK
        k = unpack_keys(self.k[pages], self.k_grid[pages], self.bits).flatten(0, 1)
        v = unpack_values(self.v[pages], self.v_grid[pages], self.bits).flatten(0, 1)
        bias = None if self.bias is None else self.bias.view(-1)[cells]
        return Cells(k[flat], v[flat], self.pos.view(-1)[cells], bias)
