"""Cases of quantisation to NVFP4, which leaves no difference to its reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.cases.case import Case, Trial
from engine.kernels.cpp.library import Context
from engine.kernels.nvfp4 import QUANTISE


def quantised(backend: str, weight: Tensor) -> list[Tensor]:
    """Codes, block scales, and the inverse of the tensor's."""
    [impl] = [impl for impl in QUANTISE.impls if impl.backend == backend]
    codes, blocks, inverse = impl.build("max")(weight)
    return [codes, blocks, torch.tensor([inverse])]


def _case(name: str, weight: Callable[[], Tensor], timed: bool = False) -> Case:
    def make(context: Context) -> Trial:
        given = weight()
        work = given.numel()
        return Trial(
            lambda: quantised("cpp", given),
            lambda: quantised("reference", given),
            20.0 * work,
            float(2 * given.nbytes),
        )

    return Case("quantise", name, make, 0.0, timed)


def _random(outs: int, ins: int, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(outs + ins)
    return torch.randn(outs, ins, generator=rng).to(dtype)


def _ragged() -> Tensor:
    """Blocks of very different size, zeros and next to nothing among them; columns of others
    between its own."""
    weight = _random(40, 192)[:, ::2]
    weight *= 10.0 ** torch.arange(-45, 35, 2.0)[:, None]
    weight[:, :16] = 0
    weight[3] = -0.0
    return weight


CASES = [
    _case("0x16", lambda: torch.zeros(0, 16)),
    _case("zeros", lambda: torch.zeros(3, 32)),
    _case("ragged", _ragged),
    *(
        _case(f"33x80 {str(dtype).removeprefix('torch.')}", lambda d=dtype: _random(33, 80, d))  # type: ignore[misc]
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    _case("3072x576", lambda: _random(3072, 576), timed=True),
]
