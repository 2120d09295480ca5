"""Parts of a weight, whatever layout its backend gave it."""

from __future__ import annotations

import pytest
import torch

from engine.model.weights import Dense


@pytest.mark.parametrize("backend", ["onednn", "reference"])
@pytest.mark.parametrize("biased", [True, False])
def test_some_outputs_and_some_inputs(backend: str, biased: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    w, x = torch.randn(24, 16, generator=rng), torch.randn(5, 16, generator=rng)
    bias = torch.randn(24, generator=rng) if biased else None
    weight = Dense(w, bias, (backend,))
    rows, cols = torch.tensor([3, 0, 17]), torch.tensor([15, 2, 3, 8])
    added = torch.zeros(24) if bias is None else bias
    some = weight.take_out(rows)
    assert (some.out_features, some.in_features) == (3, 16)
    torch.testing.assert_close(some.matmul(x), x @ w[rows].T + added[rows])
    part = weight.take_in(cols)
    assert (part.out_features, part.in_features) == (24, 4)
    torch.testing.assert_close(part.matmul(x[:, cols]), x[:, cols] @ w[:, cols].T + added)
