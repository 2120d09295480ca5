"""How cells are stored: formats by name, and plain pages: rows of the model's dtype, or another
float's, in one pool.

K and V are [pages, 16, D], the tokens' positions [pages, 16], and so are the cells' biases, where a
policy gives any; every head of every layer draws its pages from the same pool. Cells are addressed
flat: page * 16 + offset. Formats of few bits have packed pages beside them (packed_store.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache.pages import PAGE
from engine.kernels import packed
from engine.kernels.memory import zeros
from engine.kernels.packed import PACK

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of plain cells by name; "auto" is the model's own."""

PACKED = {"int8": 8, "int4": 4, "int2": 2}
"""Bits of packed cells by name."""

FORMATS = ("auto", *FLOATS, *PACKED)


class KVFormat(NamedTuple):
    """Plain cells of `dtype`; with `bits`, those before a head's last `tail` or so are packed."""

    dtype: torch.dtype
    bits: int = 0
    tail: int = 0

    @property
    def name(self) -> str:
        """As metrics call it: "float32", "int4"."""
        return f"int{self.bits}" if self.bits else str(self.dtype).removeprefix("torch.")

    @property
    def tail_cells(self) -> int:
        """Plain cells that a head holds at most, of a packed format: 64 are packed every 64
        cells, wherever `tail` are left then."""
        return self.tail + 2 * PACK - 1

    def page_bytes(self, head_dim: int) -> int:
        """K, V and positions of a plain page."""
        return CellStore.page_bytes(head_dim, self.dtype)

    def cells_in(self, nbytes: float, head_dim: int, bias: bool) -> int:
        """Cells of one head that so many bytes hold, everything counted: N(b) of Spend Bytes on
        Breadth (arXiv 2610.05685), (M - R bytes(16)) / bytes(b) + R for a tail of R."""
        side = 4 * bias
        plain = self.page_bytes(head_dim) / PAGE + side
        if not self.bits:
            return int(nbytes / plain)
        packed = self.packed_page_bytes(head_dim) / PACK + side
        return int(min(nbytes / plain, self.tail) + max(nbytes - self.tail * plain, 0) / packed)

    def packed_page_bytes(self, head_dim: int) -> int:
        """Codes, grids and positions of a packed page; 0 where there are none."""
        return packed.page_bytes(self.bits, head_dim) + 4 * PACK if self.bits else 0


def format_of(name: str, tail: str, tail_tokens: int, model: torch.dtype) -> KVFormat:
    """A format by its name, for a model of some dtype; `tail` names that of a packed one's plain
    cells."""
    if name in PACKED:
        return KVFormat(FLOATS.get(tail, model), PACKED[name], tail_tokens)
    return KVFormat(FLOATS.get(name, model))


class Cells(NamedTuple):
    """Some cells, gathered."""

    k: Tensor  # [N, D]
    v: Tensor  # [N, D]
    pos: Tensor  # [N] int32
    bias: Tensor | None  # [N] float32


class CellStore:
    """The pools. Indices are flat cells [N], int64 on the pools' device."""

    def __init__(
        self,
        pages: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
    ) -> None:
        self.k = zeros((pages, PAGE, head_dim), dtype, device)
        self.v = zeros((pages, PAGE, head_dim), dtype, device)
        self.pos = zeros((pages, PAGE), torch.int32, device)
        self.bias = zeros((pages, PAGE), torch.float32, device) if bias else None
        self._k = self.k.view(-1, head_dim)
        self._v = self.v.view(-1, head_dim)
        self._pos = self.pos.view(-1)
        self._bias = None if self.bias is None else self.bias.view(-1)

    @staticmethod
    def page_bytes(head_dim: int, dtype: torch.dtype) -> int:
        """K, V and positions of one page."""
        return PAGE * (2 * head_dim * dtype.itemsize + 4)

    @staticmethod
    def page_side_bytes(bias: bool) -> int:
        """What a page has beside them: biases."""
        return PAGE * 4 if bias else 0

    def write(self, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [N, D] into distinct cells. No value is NaN or infinite in there: attention gives a
        cell that isn't held the weight 0, and 0 * NaN would reach whoever has its page next."""
        self._k.index_copy_(0, cells, k.to(self.k.dtype))
        self._v.index_copy_(0, cells, v.to(self.v.dtype).nan_to_num())

    def write_pos(self, cells: Tensor, pos: Tensor) -> None:
        self._pos[cells] = pos

    def write_bias(self, cells: Tensor, bias: Tensor | float) -> None:
        """Of stores that have biases; others have nothing to write."""
        if self._bias is not None:
            self._bias[cells] = bias

    def read(self, cells: Tensor) -> Cells:
        k, v, pos = (pool.index_select(0, cells) for pool in (self._k, self._v, self._pos))
        return Cells(k, v, pos, None if self._bias is None else self._bias.index_select(0, cells))

    def copy(self, src: Tensor, dst: Tensor) -> None:
        """Whole pages, [n] int64 ids each."""
        for pool in (self.k, self.v, self.pos, self.bias):
            if pool is not None:
                pool[dst] = pool[src]
