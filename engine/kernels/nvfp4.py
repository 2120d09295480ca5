"""NVFP4: a sign and three bits a weight (E2M1), an E4M3 scale for 16 neighbouring inputs, and a
float32 scale for the tensor.

W = code * block scale * tensor scale. The first product has at most six significant bits, so it is
exact in float32, and the value is the real product of the three, rounded once. NVIDIA's format;
tools store the last scale as it is (ModelOpt) or its inverse (compressed-tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.dispatch import Op, select

BLOCK = 16
"""Inputs that share a block scale; `in` must be a multiple of it."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""E2M1 by its three lower bits; bit 3 is the sign."""

LARGEST = 6.0 * 448.0
"""Code times block scale, at most."""

ScaleSearch: TypeAlias = Literal["max", "mse"]
"""How block scales are chosen: the block's greatest magnitude becomes 6, or the one of a few
neighbouring E4M3 scales that leaves the smallest squared error."""

_CHUNK = 1 << 16  # weights at a time, so that temporaries stay in the processor's cache
_SMALLEST = 1  # byte of the smallest E4M3 scale above 0, 2**-9
_GREATEST = 0x7E  # byte of 448; 0x7F is NaN
# What the search tries beside the plain scale, in E4M3 steps: smaller ones clip the greatest value
# to 6, larger ones put it at 4 or so, where the grid is finer.
_STEPS = (-1, 0, 1, 4, 5)


class Quantised(NamedTuple):
    """A matrix in NVFP4."""

    codes: Tensor  # [out, in / 2] uint8, the even input in the low nibble
    blocks: Tensor  # [out, in / 16] uint8, E4M3
    inverse: float  # 1 / tensor scale, which is what compressed-tensors stores: a float32's value

    @property
    def scale(self) -> float:
        """The tensor scale, a float32's value."""
        return inverse_of(self.inverse)


def inverse_of(value: float) -> float:
    """1 / value in float32."""
    return float(torch.tensor(value, dtype=torch.float32).reciprocal())


def tensor_inverse(peaks: Tensor) -> float:
    """1 / tensor scale, a float32's value, of the blocks' greatest magnitudes.

    ValueError: they aren't finite.
    """
    amax = float(peaks.max()) if peaks.numel() else 0.0
    if not math.isfinite(amax):
        raise ValueError("the matrix holds values that aren't finite")
    if amax == 0:
        return 1.0
    # no greater than 2**126, whose inverse is the smallest normal float32
    return min(float(torch.tensor(LARGEST) / torch.tensor(amax)), 2.0**126)


def quantise(weight: Tensor, search: ScaleSearch = "max") -> Quantised:
    """W [out, in] of any float type on CPU, to the nearest code, ties to even.

    The tensor scale puts the greatest block scale at 448. A block of nothing but zeros, or too
    small for any scale, has the smallest scale rather than 0, so that nothing divides by 0; a
    negative value that rounds to 0 becomes -0. ValueError: values that aren't finite, or an `in`
    that isn't a multiple of 16 (no checkpoint or kernel of other engines takes such a matrix).
    """
    _check(weight, search)
    found: Quantised = select(QUANTISE, search).build(search)(weight)
    return found


QUANTISE: Op[ScaleSearch] = Op("quantise")
"""`build(search)` gives a function of a checked W, to `Quantised` with the same bits everywhere."""


@QUANTISE.register("reference", refuses=lambda search: None)
def _plain(search: ScaleSearch) -> Callable[[Tensor], Quantised]:
    return partial(_quantise, search=search)


def _quantise(weight: Tensor, search: ScaleSearch) -> Quantised:
    amax = _block_amax(weight)  # [out, in / 16]
    inverse = tensor_inverse(amax)
    blocks = encode_e4m3(amax.div_(6).mul_(inverse)).clamp_(min=_SMALLEST)
    codes = torch.empty(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
    tensor = inverse_of(inverse)
    for part in _row_chunks(weight):
        values = weight[part].float().reshape(-1, BLOCK)
        bytes_ = blocks[part].view(-1)
        if search == "mse":
            bytes_.copy_(_best(values, bytes_, tensor))
        scaled = values / decode_e4m3(bytes_).mul_(tensor)[:, None]
        codes[part] = _pack(encode_e2m1(scaled)).view(-1, codes.shape[1])
    return Quantised(codes, blocks, inverse)


def dequantise(codes: Tensor, blocks: Tensor, scales: Tensor) -> Tensor:
    """codes [out, in / 2], blocks [out, in / 16], a tensor scale for each row, [out] float32 -> W
    [out, in] float32."""
    pairs = _code_pairs(codes.device).index_select(0, codes.flatten().int())
    values = pairs.view(torch.float32).view(*blocks.shape, BLOCK)
    values *= decode_e4m3(blocks)[..., None]
    return values.flatten(1).mul_(scales[:, None])


def encode_e2m1(values: Tensor) -> Tensor:
    """float32 on CPU -> uint8 codes of the same shape, nearest, ties to even, 6 from 5 on."""
    given = values.numpy()  # whose comparisons are vectorised; torch's cost ten times as much
    magnitude = np.abs(given)
    codes = np.signbit(given).view(np.uint8) << 3
    for bound, up in _BOUNDS:
        codes += (magnitude >= bound if up else magnitude > bound).view(np.uint8)
    return torch.from_numpy(codes)


def encode_e4m3(values: Tensor) -> Tensor:
    """float32, none negative -> bytes of E4M3, nearest, ties to even, 448 at most."""
    return values.clamp(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(bytes_: Tensor) -> Tensor:
    """Bytes of E4M3 -> float32; 0x7F and 0xFF are NaN."""
    table = _e4m3_values(bytes_.device)
    return table.index_select(0, bytes_.flatten().int()).view(bytes_.shape)


# Between neighbouring magnitudes, and whether the middle itself goes up: to the even code.
_BOUNDS = tuple(
    ((low + high) / 2, code % 2 == 1) for code, (low, high) in enumerate(pairwise(MAGNITUDES))
)


@cache
def _e4m3_values(device: torch.device) -> Tensor:
    """Value of each byte: four bits of exponent with bias 7, three of mantissa."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = math.ldexp(mantissa + 8 * (exponent > 0), max(exponent, 1) - 10)
        value = math.nan if byte & 0x7F == 0x7F else value
        values.append(-value if byte & 0x80 else value)
    return torch.tensor(values, device=device)


@cache
def _code_pairs(device: torch.device) -> Tensor:
    """A byte of two codes -> their two float32 values in the bits of one int64, [256]."""
    signed = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((signed[byte & 15], signed[byte >> 4]), 1).view(torch.int64).squeeze(1)


def _check(weight: Tensor, search: str) -> None:
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a float matrix [out, in], not {weight.dtype} of {list(weight.shape)}"
        )
    if weight.shape[1] % BLOCK:
        raise ValueError(
            f"NVFP4 takes {BLOCK} inputs a block, but the matrix has {weight.shape[1]} inputs, "
            "which isn't a multiple of it; use int8 or bf16"
        )
    if search not in get_args(ScaleSearch):
        raise ValueError(f"scale must be one of {', '.join(get_args(ScaleSearch))}, not {search!r}")


def _row_chunks(weight: Tensor) -> list[slice]:
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    return [slice(at, at + step) for at in range(0, len(weight), step)]


def _block_amax(weight: Tensor) -> Tensor:
    """Greatest magnitude of each block, [out, in / 16] float32."""
    amax = torch.empty(len(weight), weight.shape[1] // BLOCK)
    for part in _row_chunks(weight):
        magnitudes = weight[part].float().abs().reshape(1, -1)
        amax[part] = F.max_pool1d(magnitudes, BLOCK).view(-1, amax.shape[1])
    return amax


def _pack(codes: Tensor) -> Tensor:
    """Neighbours [.., 2 n] into bytes [n]: two codes are read as one 16-bit number, and the upper
    one is shifted below the lower one."""
    both = codes.view(torch.int16)
    return torch.bitwise_or(both, both >> 4).to(torch.uint8)


def _best(values: Tensor, bytes_: Tensor, tensor: float) -> Tensor:
    """Of the scales near `bytes_` [n], the one with the smallest squared error of values [n, 16];
    the plain one where none is better."""
    magnitudes = torch.tensor(MAGNITUDES)
    wanted = values.abs()
    best = bytes_.clone()
    least = torch.full(bytes_.shape, torch.inf)
    for step in sorted(_STEPS, key=abs):
        tried = (bytes_.short() + step).clamp_(_SMALLEST, _GREATEST).to(torch.uint8)
        scale = decode_e4m3(tried).mul_(tensor)[:, None]
        codes = encode_e2m1(wanted / scale).int()
        found = magnitudes.index_select(0, codes.flatten()).view_as(wanted).mul_(scale)
        error = found.sub_(wanted).square_().sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, tried, best)
    return best
