"""int8 weights: a code from -127 to 127 and a float32 scale for each output row.

One scale a row, not one for each group of columns: sums of int8 products then need no floats before
the end, and eight bits leave an error of about 0.9 % of a row's own spread even so.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 16  # weights at a time, so that temporaries stay in the processor's cache


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W [out, in] of any float type -> codes [out, in] int8, scales [out] float32.

    The scale puts a row's greatest magnitude at 127; ties go to the even code. ValueError for
    values that aren't finite.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"weight must be a float matrix [out, in], not {weight.dtype} of {list(weight.shape)}"
        )
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(len(weight))
    step = max(1, _CHUNK // max(1, weight.shape[1]))
    for at in range(0, len(weight), step):
        values = weight[at : at + step].float()
        scale = values.abs().amax(1).div_(127) if values.numel() else values.new_zeros(len(values))
        scale.clamp_(min=torch.finfo(torch.float32).tiny)  # a row of zeros, or next to nothing
        scales[at : at + step] = scale
        codes[at : at + step] = (values / scale[:, None]).round_().clamp_(-127, 127)
    if not scales.isfinite().all():
        raise ValueError("weight holds values that aren't finite")
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [out, in], scales [out] -> W [out, in] float32: their product, rounded once."""
    return codes.float().mul_(scales[:, None])
