"""Cells of 2, 4 or 8 bits: what a packed page holds, bit by bit.

KIVI (Liu et al. 2024, arXiv 2402.02750): a page is 64 cells of one kv head. Keys have an even grid
for each channel over the page's cells, values one for each cell over a run of channels. A grid is a
float16 step and a float16 minimum; a number is minimum + step * code, in float32, and its code the
nearest (ties to even) of 0 to 2^bits - 1. What differs from KIVI: grids of keys and of values are
64 wide (theirs 32), and codes are chosen for the grid as it is stored, after its own rounding.

A byte's low bits come first. Codes lie so that sixteen lanes unpack without a shuffle:

| codes of keys   | [D, 16, 4]   | channel d, lane l: codes of cells l, 16 + l, 32 + l, 48 + l |
| codes of values | [16, D, 4]   | quad q, channel d: codes of cells 4q to 4q + 3              |
| grids of keys   | [2, D]       | steps, then minima                                          |
| grids of values | [2, D/C, 64] | the same; C channels share one                              |
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

PACK = 64
"""Cells of a packed page."""

BITS = (2, 4, 8)

_LANES = 16
_LARGEST = 65504.0  # of float16


class PackedCells(NamedTuple):
    """Pools of packed pages, and which of them each sequence's heads have."""

    k: Tensor  # [pages, D * 8 * bits] uint8 codes
    k_grid: Tensor  # [pages, 2, D] float16
    v: Tensor  # [pages, D * 8 * bits] uint8 codes
    v_grid: Tensor  # [pages, 2, D / C, 64] float16
    pos: Tensor  # [pages, 64] int32
    bias: Tensor | None  # [pages, 64] float32
    table: Tensor  # [B, H, G] int32 page ids; any page where the fill is 0
    fill: Tensor  # [B, H, G] int32: a page's first so many cells are the head's; 0 past its last

    @property
    def bits(self) -> int:
        return self.k.shape[1] // (self.k_grid.shape[2] * PACK // 8)


def value_channels(dim: int) -> int:
    """C: 64, or the most of 48, 32 and 16 that divides the head's dimension, or all of it."""
    return next((c for c in (64, 48, 32, 16) if dim % c == 0), dim)


def page_bytes(bits: int, dim: int) -> int:
    """Codes and grids of one page."""
    return 2 * dim * PACK * bits // 8 + 4 * dim + 4 * PACK * (dim // value_channels(dim))


def pack_keys(k: Tensor, count: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """k [n, 64, D], of which the first `count` [n] cells are there (at least one): codes
    [n, D * 8 * bits] uint8 and grids [n, 2, D] float16."""
    k = _filled(k, count)
    grid = _grid(k.amin(1), k.amax(1), bits)  # [n, 2, D]
    step, least = grid.float()[:, :, None].unbind(1)  # [n, 1, D]
    return keys_of_codes(_codes(k, step, least, bits), bits), grid


def pack_values(v: Tensor, count: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """v [n, 64, D] -> codes [n, D * 8 * bits] uint8 and grids [n, 2, D / C, 64] float16."""
    v = _filled(v, count)
    width = value_channels(v.shape[2])
    runs = v.view(*v.shape[:2], v.shape[2] // width, width).transpose(1, 2)  # [n, D / C, 64, C]
    grid = _grid(runs.amin(3), runs.amax(3), bits)  # [n, 2, D / C, 64]
    step, least = grid.float()[..., None].unbind(1)  # [n, D / C, 64, 1]
    codes = _codes(runs, step, least, bits).transpose(1, 2).flatten(2)
    return values_of_codes(codes, bits), grid


def unpack_keys(packed: Tensor, grid: Tensor, bits: int) -> Tensor:
    """Codes [n, D * 8 * bits] and grids [n, 2, D] -> [n, 64, D] float32."""
    step, least = grid.float()[:, :, None].unbind(1)
    return codes_of_keys(packed, bits).float().mul_(step).add_(least)


def unpack_values(packed: Tensor, grid: Tensor, bits: int) -> Tensor:
    """Codes [n, D * 8 * bits] and grids [n, 2, D / C, 64] -> [n, 64, D] float32."""
    step, least = grid.mT.float()[..., None].unbind(1)  # [n, 64, D / C, 1]
    codes = codes_of_values(packed, bits).float()
    codes = codes.view(*codes.shape[:2], grid.shape[2], codes.shape[2] // grid.shape[2])
    return codes.mul_(step).add_(least).flatten(2)


def keys_of_codes(codes: Tensor, bits: int) -> Tensor:
    """[n, 64, D] -> [n, D * 8 * bits]."""
    return _bytes(codes.view(len(codes), 4, _LANES, codes.shape[2]).permute(0, 3, 2, 1), bits)


def codes_of_keys(packed: Tensor, bits: int) -> Tensor:
    """[n, D * 8 * bits] -> [n, 64, D] uint8."""
    codes = _unbytes(packed, bits)
    codes = codes.view(len(codes), codes.shape[1] // PACK, _LANES, 4)
    return codes.permute(0, 3, 2, 1).flatten(1, 2)


def values_of_codes(codes: Tensor, bits: int) -> Tensor:
    """[n, 64, D] -> [n, D * 8 * bits]."""
    return _bytes(codes.view(len(codes), _LANES, 4, codes.shape[2]).permute(0, 1, 3, 2), bits)


def codes_of_values(packed: Tensor, bits: int) -> Tensor:
    """[n, D * 8 * bits] -> [n, 64, D] uint8."""
    codes = _unbytes(packed, bits)
    codes = codes.view(len(codes), _LANES, codes.shape[1] // PACK, 4)
    return codes.permute(0, 1, 3, 2).flatten(1, 2)


def _filled(x: Tensor, count: Tensor) -> Tensor:
    """Float32 within what a grid spans, with the first cell's numbers where no cell is."""
    there = torch.arange(PACK, device=x.device) < count[:, None]
    x = torch.where(there[..., None], x.float(), x[:, :1].float())
    return x.nan_to_num(0.0, _LARGEST, -_LARGEST).clamp_(-_LARGEST, _LARGEST)


def _grid(least: Tensor, most: Tensor, bits: int) -> Tensor:
    """Steps and minima side by side at axis 1."""
    stored = least.half()
    step = ((most - stored.float()) / (2**bits - 1)).clamp_(0, _LARGEST).half()
    return torch.stack((step, stored), dim=1)


def _codes(x: Tensor, step: Tensor, least: Tensor, bits: int) -> Tensor:
    inverse = torch.where(step > 0, step, torch.inf)  # a grid without width has the code 0 alone
    return ((x - least) / inverse).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def _bytes(codes: Tensor, bits: int) -> Tensor:
    """Neighbouring codes of [n, ...] side by side in bytes: [n, codes * bits / 8]."""
    flat = codes.flatten(1)
    each = flat.view(len(flat), flat.shape[1] * bits // 8, 8 // bits)
    packed = each[..., 0].clone()
    for i in range(1, 8 // bits):
        packed |= each[..., i] << bits * i
    return packed


def _unbytes(packed: Tensor, bits: int) -> Tensor:
    parts = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(1)
