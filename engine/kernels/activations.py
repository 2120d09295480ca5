"""Activations rounded to integers, so that a product with integer weights is one of integers.

Symmetric, with a scale for each block of 16 inputs: the block's greatest magnitude is the greatest
level. A block's scale follows its own outlier only, and 16 inputs are what NVFP4's weights share a
scale over, so nothing more is summed apart for it. The step of eight bits is 1 / 254 of the block's
range, that of sixteen 1 / 65,024.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Inputs that share a scale; the last block of a row may be shorter."""

LEVELS = {8: 127, 16: 127 * 256}
"""Bits -> the greatest integer: with two bytes, the upper one is from -127 to 127 too."""

_NOTHING = 1e-30
"""A block of no greater magnitude is zeros."""


def round_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """x [T, in] float32 -> integers [T, blocks, 16] as float32, and scales [T, blocks].

    Ties go to the even integer. A block with a NaN or an infinity is zeros with a scale of NaN or
    infinity, so all that is made of its row is NaN.
    """
    levels = LEVELS[bits]
    count = -(-x.shape[1] // BLOCK)
    padded = F.pad(x, (0, count * BLOCK - x.shape[1]))
    blocks = padded.reshape(len(x), count, BLOCK)
    most = blocks.abs().amax(-1)
    plain = most.isfinite() & (most >= _NOTHING)
    # by a tensor: a number over a tensor would be its product with the rounded inverse
    factor = torch.where(plain, most.new_tensor(levels) / most, 0)
    whole = (blocks.nan_to_num(0, 0, 0) * factor[..., None]).round_()
    return whole, torch.where(plain, most / levels, torch.where(most < _NOTHING, 0, most))


def rounded(x: Tensor, bits: int) -> Tensor:
    """x [T, in] float32 with the values that its rounding has."""
    whole, scales = round_rows(x, bits)
    return (whole * scales[..., None]).flatten(1)[:, : x.shape[1]]
