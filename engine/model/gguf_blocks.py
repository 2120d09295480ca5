"""GGUF's number formats as float tensors.

A block type keeps 32 to 256 weights of a row together with their scales. The common simple ones are
unpacked here in a few vectorised passes over chunks that stay in the processor's cache; all others
go through `gguf.quants`, whose results every path equals bit for bit: a scale has 11 bits and a
weight at most 8, so their product is exact in float32 and no order of operations shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

Kind = GGMLQuantizationType

FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_CHUNK = 1 << 18  # weights unpacked at a time


@cache
def supported(kind: GGMLQuantizationType) -> bool:
    """Whether `dequantise` or a plain view gives this type's weights."""
    if kind in FLOATS:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantise(raw: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """Rows of blocks [R, bytes] uint8, contiguous -> float32 [R, weights]."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    out = torch.empty(len(blocks), block)
    unpack = _UNPACK.get(kind) or partial(_by_gguf, kind)
    step = _CHUNK // block
    for at in range(0, len(blocks), step):
        unpack(blocks[at : at + step], out[at : at + step])
    return out.view(len(raw), -1)


def _by_gguf(kind: GGMLQuantizationType, raw: Tensor, out: Tensor) -> None:
    # one long row: gguf works through rows sixteen at a time, in Python
    out.view(-1).copy_(torch.from_numpy(dequantize(raw.view(1, -1).numpy(), kind)).view(-1))


def _half(raw: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, [n, 1] float32."""
    return raw[:, at : at + 2].view(torch.float16).float()


def _nibbles(raw: Tensor, at: int) -> Tensor:
    """Sixteen bytes from `at`: first the low halves, then the high ones, [n, 32] uint8."""
    packed = raw[:, at : at + 16].contiguous().view(torch.int64)  # [n, 2], eight bytes at once
    both = torch.stack((packed, packed >> 4), 1).bitwise_and_(0x0F0F0F0F0F0F0F0F)
    return both.view(torch.uint8).view(-1, 32)


def _q4_0(raw: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(raw, 2).view(torch.int8).sub_(8)).mul_(_half(raw, 0))


def _q4_1(raw: Tensor, out: Tensor) -> None:
    out.copy_(_nibbles(raw, 4)).mul_(_half(raw, 0)).add_(_half(raw, 2))


@cache
def _fifth_bits() -> Tensor:
    """Byte of eight fifth bits -> eight bytes to OR below as one int64, [256].

    A set bit adds nothing and a clear one the upper half of a byte, so that the OR with the lower
    four bits is, read as int8, the weight less 16.
    """
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return torch.where(bits == 1, 0x00, 0xF0).to(torch.uint8).view(torch.int64).squeeze(1)


def _q5_0(raw: Tensor, out: Tensor) -> None:
    low = _nibbles(raw, 6).view(torch.int64)  # [n, 4]
    low |= _fifth_bits().index_select(0, raw[:, 2:6].int().view(-1)).view(-1, 4)
    out.copy_(low.view(torch.int8)).mul_(_half(raw, 0))


def _q8_0(raw: Tensor, out: Tensor) -> None:
    out.copy_(raw[:, 2:].view(torch.int8)).mul_(_half(raw, 0))


_UNPACK: dict[GGMLQuantizationType, Callable[[Tensor, Tensor], None]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q8_0: _q8_0,
}
