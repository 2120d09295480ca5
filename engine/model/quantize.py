"""The number formats that weights can be held in: one table, and what makes each.

`rtn8` to `rtn2` only round: their values are those of a format of so many bits, held as floats.
That shows what a format does to the answers, and saves no memory and no time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import int8, nvfp4
from engine.kernels.formats import DenseParts, Int8Parts, Nvfp4Parts, Parts


def round_to_nearest(weight: Tensor, bits: int, group: int = 32) -> Tensor:
    """Every value on the nearest point of an even grid of 2**bits, a grid for each `group` of
    neighbouring columns of a row (the last is shorter where they don't divide).

    A group's grid spans its values and 0, so 0 is always a point of it (the zero point is an
    integer), and a group of one value keeps it. Scale and zero point are float32; a bfloat16
    weight then holds the nearest bfloat16 of its point. W, maybe a view of a file, isn't changed.
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


Store = Callable[[Tensor, Tensor | None, torch.dtype], Parts]
"""W [out, in] of any float type on CPU, the bias, the dtype of activations -> what is held."""


def as_floats(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Parts:
    """In the activations' own dtype."""
    return DenseParts(weight.to(dtype), bias)


def as_rounded(weight: Tensor, bias: Tensor | None, dtype: torch.dtype, bits: int) -> Parts:
    """In the activations' own dtype, with fewer values."""
    return DenseParts(round_to_nearest(weight.to(dtype), bits), bias)


def as_bf16(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Parts:
    return DenseParts(weight.bfloat16(), bias)


def as_int8(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Parts:
    return Int8Parts(*int8.quantise(weight), bias)


def as_nvfp4(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Parts:
    """By the greatest magnitude of each block: a search would take several times as long as all the
    rest of a start."""
    found = nvfp4.quantise(weight)
    return Nvfp4Parts(found.codes, found.blocks, torch.full((len(weight),), found.scale), bias)


class WeightFormat(NamedTuple):
    """How the matrices of attention and MLP are held, and how the LM head is.

    The embedding, norms and biases keep their values in every format.
    """

    layers: Store
    head: Store
    words: str


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "float": WeightFormat(as_floats, as_floats, "as stored"),
    "bf16": WeightFormat(as_bf16, as_bf16, "bfloat16"),
    "int8": WeightFormat(as_int8, as_int8, "int8 with a scale a row"),
    "nvfp4": WeightFormat(as_nvfp4, as_int8, "NVFP4, the LM head int8 with a scale a row"),
    **{
        f"rtn{bits}": WeightFormat(
            partial(as_rounded, bits=bits), as_floats, f"floats rounded to {bits} bits"
        )
        for bits in range(8, 1, -1)
    },
}
"""What `ModelSpec.weights` may name.

The head is read whole for every token, and on small models it is a fifth to a third of all bytes:
hence int8 beside NVFP4, where its loss is far below that of the layers.
"""

ACTIVATIONS: Mapping[str, int] = {"float": 0, "int16": 16, "int8": 8}
"""What `ModelSpec.activations` may name -> bits that activations are rounded to (0: not) before
they meet integer weights."""
