"""Parts of a weight, whatever its format and the layout that its backend gave it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.formats import DenseParts, Parts
from engine.model.quantize import as_bf16, as_floats, as_int8, as_nvfp4
from engine.model.weights import Stored

STORES = {"float": as_floats, "bf16": as_bf16, "int8": as_int8, "nvfp4": as_nvfp4}


def random_parts(name: str, biased: bool) -> Parts:
    rng = torch.Generator().manual_seed(0)
    bias = torch.randn(24, generator=rng) if biased else None
    return STORES[name](torch.randn(24, 64, generator=rng), bias, torch.float32)


def columns(weight: Stored) -> Tensor:
    """Two of its groups and, where columns go one by one, another order."""
    groups = torch.tensor([3, 1])
    cols = (groups[:, None] * 16 + torch.arange(16)).flatten()
    return cols if weight.in_group == 16 else cols.flip(0)[:7]


@pytest.mark.parametrize("backend", ["onednn", "reference"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", STORES)
def test_some_outputs_and_some_inputs(name: str, biased: bool, backend: str) -> None:
    parts = random_parts(name, biased)
    w = parts.dense(torch.float32)
    added = torch.zeros(24) if parts.bias is None else parts.bias
    weight = Stored(parts, torch.float32, (backend,))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    rows, cols = torch.tensor([3, 0, 17]), columns(weight)
    greatest = float((x @ w.T).abs().max())
    near: dict[str, Any] = {}
    if name != "float" and backend == "onednn":
        # It refuses, and where tile registers serve instead they see x as two bfloat16s.
        near = {"atol": 2.0**-17 * greatest, "rtol": 0.0}
    torch.testing.assert_close(weight.matmul(x), x @ w.T + added, **near)
    some = weight.take_out(rows)
    assert (some.out_features, some.in_features) == (3, 64)
    torch.testing.assert_close(some.matmul(x), x @ w[rows].T + added[rows], **near)
    part = weight.take_in(cols)
    assert (part.out_features, part.in_features) == (24, len(cols))
    torch.testing.assert_close(part.matmul(x[:, cols]), x[:, cols] @ w[:, cols].T + added, **near)
    assert some.nbytes < weight.nbytes
    assert part.nbytes < weight.nbytes


@pytest.mark.parametrize("cols", [[0, 1, 2], [*range(8, 24)], [*range(15, -1, -1)]])
def test_nvfp4_gives_up_whole_blocks_only(cols: list[int]) -> None:
    weight = Stored(random_parts("nvfp4", biased=False), torch.float32)
    with pytest.raises(ValueError, match="by whole blocks of 16"):
        weight.take_in(torch.tensor(cols))


def test_bytes_of_each_format() -> None:
    held = {name: Stored(random_parts(name, biased=False), torch.float32).nbytes for name in STORES}
    rows, weights = 24, 24 * 64
    assert held == {
        "float": 4 * weights,
        "bf16": 2 * weights,
        "int8": weights + 4 * rows,
        "nvfp4": weights // 2 + weights // 16 + 4 * rows,
    }


def test_wider_weights_than_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.float32 doesn't run under .* torch.bfloat16"):
        Stored(DenseParts(torch.ones(2, 2), None), torch.bfloat16)
