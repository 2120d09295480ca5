"""Weights rounded in memory: their values are those of a number format, held in the model's dtype.

This shows what a format's rounding does to the answers. It saves no memory and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
"""W [out, in] -> the same shape and dtype; never in place, as W may be a view of a file."""


def round_to_nearest(weight: Tensor, bits: int, group: int = 32) -> Tensor:
    """Every value on the nearest point of an even grid of 2**bits, a grid for each `group` of
    neighbouring columns of a row (the last is shorter where they don't divide).

    A group's grid spans its values and 0, so 0 is always a point of it (the zero point is an
    integer), and a group of one value keeps it. Scale and zero point are float32; a bfloat16
    weight then holds the nearest bfloat16 of its point.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a float matrix [out, in], not {weight.dtype} of {list(weight.shape)}"
        )
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be from 2 to 8, not {bits}")
    if group < 1:
        raise ValueError(f"group must be at least 1, not {group}")
    columns, levels = weight.shape[1], 2**bits - 1
    padded = F.pad(weight.float(), (0, -columns % group))  # zeros widen no grid
    values = padded.reshape(len(weight), -1, group)  # [out, groups, group]
    low = values.amin(-1, keepdim=True).clamp_(max=0)
    high = values.amax(-1, keepdim=True).clamp_(min=0)
    scale = (high - low).div_(levels)
    scale.masked_fill_(scale == 0, 1)  # only zeros: any grid holds them
    zero = (-low / scale).round_()
    points = (values / scale).round_().add_(zero).clamp_(0, levels)
    return points.sub_(zero).mul_(scale).flatten(1)[:, :columns].to(weight.dtype)


def as_stored(weight: Tensor) -> Tensor:
    """No rounding."""
    return weight


WEIGHT_FORMATS: Mapping[str, Rounding] = {
    "float": as_stored,
    **{f"rtn{bits}": partial(round_to_nearest, bits=bits) for bits in range(8, 1, -1)},
}
"""What `ModelSpec.weights` may name."""
