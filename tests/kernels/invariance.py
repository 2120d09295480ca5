"""Bit for bit where the library gives it; a stated bound where it doesn't."""

import functools

import torch
from torch import Tensor

from engine.kernels.attention import SPLIT
from engine.kernels.dispatch import select
from engine.kernels.linear import LINEAR, LinearSpec

BOUND = 1e-5
"""The greatest difference, of the largest output, where a CPU's libraries aren't invariant."""


@functools.cache
def library_is_row_invariant(dtype: torch.dtype) -> bool:
    """Whether the bare primitives give a row the same bits whatever number of rows runs."""
    if select(LINEAR, LinearSpec("cpu", dtype)).backend != "onednn":
        return False
    rng = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 128, generator=rng) for n in (65, SPLIT))
    packed = torch.ops.mkldnn._reorder_linear_weight(w.to(dtype), None)

    def linear(rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        return out

    def keys(rows: Tensor) -> Tensor:
        return torch.bmm(rows[None], w.T[None])[0]

    def values(rows: Tensor) -> Tensor:
        return torch.bmm(rows[None], w[None])[0]

    weights = keys(x).exp()
    xs = x.to(dtype)
    return all(
        torch.equal(f(rows[:n]), f(rows)[:n])
        for f, rows, least in ((linear, xs, 2), (keys, x, 8), (values, weights, 8))
        for n in (2, 3, 8, 12, 17, 33, 64)
        if n >= least
    )


def assert_same_rows(one: Tensor, other: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Results of the same rows in other company; `dtype` is the one that they were computed in."""
    if library_is_row_invariant(dtype):
        assert torch.equal(one, other)
    else:
        bound = BOUND if dtype == torch.float32 else 2.0**-7
        assert (one - other).abs().max() <= bound * other.abs().max()
