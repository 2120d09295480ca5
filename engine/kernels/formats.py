"""What a weight W [out, in] is made of in each number format: plain tensors, no backend's layout.

A backend's linear is built from them and gives them back (`Linear.parts`), so that neurons can be
taken out of any weight, whatever layout it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.kernels import int8, nvfp4


class DenseParts(NamedTuple):
    """Floats as they are: float32, or bfloat16 under activations of either dtype."""

    weight: Tensor  # [out, in]
    bias: Tensor | None  # [out]

    @property
    def shape(self) -> tuple[int, int]:
        out, ins = self.weight.shape
        return out, ins

    @property
    def in_group(self) -> int:
        return 1

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W [out, in]; not always a copy."""
        return self.weight.to(dtype)

    def take_out(self, rows: Tensor) -> DenseParts:
        return DenseParts(self.weight[rows], _some(self.bias, rows))

    def take_in(self, cols: Tensor) -> DenseParts:
        return DenseParts(self.weight[:, cols], self.bias)


class Int8Parts(NamedTuple):
    """W = codes * scales[:, None], codes from -127 to 127."""

    codes: Tensor  # [out, in] int8
    scales: Tensor  # [out] float32
    bias: Tensor | None  # [out]

    @property
    def shape(self) -> tuple[int, int]:
        out, ins = self.codes.shape
        return out, ins

    @property
    def in_group(self) -> int:
        return 1

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W [out, in], a copy."""
        return int8.dequantise(self.codes, self.scales).to(dtype)

    def take_out(self, rows: Tensor) -> Int8Parts:
        return Int8Parts(self.codes[rows], self.scales[rows], _some(self.bias, rows))

    def take_in(self, cols: Tensor) -> Int8Parts:
        return Int8Parts(self.codes[:, cols], self.scales, self.bias)


class Nvfp4Parts(NamedTuple):
    """W = E2M1 codes * E4M3 blocks * scales[:, None]; `in` is a multiple of 16.

    A scale for each row, not for the tensor: fused projections keep each its own tensor's.
    """

    codes: Tensor  # [out, in / 2] uint8, the even input in the low nibble
    blocks: Tensor  # [out, in / 16] uint8: E4M3, never negative nor NaN
    scales: Tensor  # [out] float32
    bias: Tensor | None  # [out]

    @property
    def shape(self) -> tuple[int, int]:
        out, half = self.codes.shape
        return out, 2 * half

    @property
    def in_group(self) -> int:
        return nvfp4.BLOCK

    def dense(self, dtype: torch.dtype) -> Tensor:
        """W [out, in], a copy."""
        return nvfp4.dequantise(self.codes, self.blocks, self.scales).to(dtype)

    def take_out(self, rows: Tensor) -> Nvfp4Parts:
        bias = _some(self.bias, rows)
        return Nvfp4Parts(self.codes[rows], self.blocks[rows], self.scales[rows], bias)

    def take_in(self, cols: Tensor) -> Nvfp4Parts:
        """By whole blocks: ValueError for others."""
        blocks = _blocks_of(cols)
        codes = self.codes.reshape(len(self.codes), -1, nvfp4.BLOCK // 2)[:, blocks]
        return Nvfp4Parts(codes.flatten(1), self.blocks[:, blocks], self.scales, self.bias)


Parts: TypeAlias = DenseParts | Int8Parts | Nvfp4Parts


def format_of(parts: Parts, dtype: torch.dtype) -> str:
    """The name of a weight's format under activations of `dtype`: "float" is that dtype's own."""
    match parts:
        case Int8Parts():
            return "int8"
        case Nvfp4Parts():
            return "nvfp4"
    if parts.weight.dtype == dtype:
        return "float"
    if parts.weight.dtype == torch.bfloat16:
        return "bf16"
    raise ValueError(f"a weight in {parts.weight.dtype} doesn't run under activations in {dtype}")


def nbytes(parts: Parts) -> int:
    """Of all tensors."""
    return sum(part.nbytes for part in parts if part is not None)


def moved(parts: Parts, device: torch.device) -> Parts:
    """On `device`."""
    made: Callable[..., Parts] = type(parts)
    return made(*(None if part is None else part.to(device) for part in parts))


def stacked(parts: Sequence[Nvfp4Parts], bias: Tensor | None) -> Nvfp4Parts:
    """Matrices of the same inputs as one, each with its own scales; `bias` is for all of it."""
    return Nvfp4Parts(
        torch.cat([p.codes for p in parts]),
        torch.cat([p.blocks for p in parts]),
        torch.cat([p.scales for p in parts]),
        bias,
    )


def _some(bias: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if bias is None else bias[rows]


def _blocks_of(cols: Tensor) -> Tensor:
    """Which blocks the columns are, if they are whole ones in order."""
    size = nvfp4.BLOCK
    if len(cols) % size == 0:
        first = cols[::size]
        whole = first[:, None] + torch.arange(size, device=cols.device)
        if not (first % size).any() and torch.equal(whole.flatten(), cols):
            return first // size
    raise ValueError(
        f"columns of an NVFP4 weight are taken by whole blocks of {size}, which these "
        f"{len(cols)} columns aren't"
    )
