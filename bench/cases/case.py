"""What a case is, and how a result is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.cpp.library import Context


class Trial(NamedTuple):
    """A case on one context. `run` gives the outputs anew at every call; `expected` is the torch
    reference's. `flops` and `nbytes` are what the work takes at least."""

    run: Callable[[], Sequence[Tensor]]
    expected: Callable[[], Sequence[Tensor]]
    flops: float = 0.0
    nbytes: float = 0.0


class Case(NamedTuple):
    """An op on one input, drawn from a fixed seed. `bound` is the greatest difference allowed, in
    parts of the expected output's greatest magnitude; `tiles` is that where tile registers serve.
    `timed`: one of a real model's shapes."""

    op: str
    name: str
    make: Callable[[Context], Trial]
    bound: float
    timed: bool = False
    tiles: float | None = None

    def bound_on(self, set: str) -> float:
        """Of one instruction set."""
        return self.bound if self.tiles is None or set != "amx" else self.tiles


def error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The greatest difference in parts of the expected magnitude; infinite where NaN or infinity
    stand in one and not in the other, or shapes differ."""
    worst = 0.0
    for got, want in zip(found, expected, strict=True):
        got, want = got.double(), want.double()
        if got.shape != want.shape or not torch.equal(got.isfinite(), want.isfinite()):
            return float("inf")
        finite = want.isfinite()
        scale = max(float(want[finite].abs().max()) if finite.any() else 0.0, 1e-30)
        gap = float((got[finite] - want[finite]).abs().max()) if finite.any() else 0.0
        worst = max(worst, gap / scale)
    return worst
