"""Bit for bit where the library gives it; a stated bound where it doesn't."""

import functools

import torch
from torch import Tensor

from engine.kernels.dispatch import select
from engine.kernels.linear import LINEAR, LinearSpec

BOUND = 1e-5
"""The greatest difference, of the largest output, where a CPU's libraries aren't invariant."""


@functools.cache
def library_is_row_invariant(dtype: torch.dtype) -> bool:
    """Whether the bare primitives give a row the same bits whatever number of rows runs."""
    rng = torch.Generator().manual_seed(1)
    x, w = torch.randn(65, 192, generator=rng), torch.randn(160, 192, generator=rng)
    if select(LINEAR, LinearSpec("cpu", dtype)).backend != "onednn":
        return False
    packed = torch.ops.mkldnn._reorder_linear_weight(w.to(dtype), None)

    def linear(rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
        return out

    def product(rows: Tensor) -> Tensor:
        return torch.bmm(rows[None], w.T[None])[0]

    xs = x.to(dtype)
    return all(
        torch.equal(linear(xs[:n]), linear(xs)[:n]) and torch.equal(product(x[:m]), product(x)[:m])
        for n, m in ((2, 8), (3, 9), (8, 12), (17, 17), (33, 33), (64, 64))
    )


def assert_same_rows(one: Tensor, other: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Results of the same rows in other company; `dtype` is the one that they were computed in."""
    if library_is_row_invariant(dtype):
        assert torch.equal(one, other)
    else:
        bound = BOUND if dtype == torch.float32 else 2.0**-7
        assert (one - other).abs().max() <= bound * other.abs().max()
