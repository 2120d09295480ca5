"""int8 rows against values worked out by hand, and their error."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.int8 import dequantise, quantise


def test_worked_by_hand() -> None:
    w = torch.tensor([[127.0, -63.5, 0.5, 1.5, -1.4], [-2.54, 1.28, 0.0, 0.004, 0.02]])
    codes, scales = quantise(w)
    assert codes.tolist() == [[127, -64, 0, 2, -1], [-127, 64, 0, 0, 1]]  # ties to even: 63.5, 0.5
    torch.testing.assert_close(scales, torch.tensor([1.0, 0.02]))
    assert dequantise(codes, scales)[0].tolist() == [127.0, -64.0, 0.0, 2.0, -1.0]


def test_half_a_step_of_error_whatever_the_row_and_dtype() -> None:
    rng = torch.Generator().manual_seed(0)
    w = torch.randn(40, 70, generator=rng) * torch.logspace(-30, 30, 40)[:, None]
    for weight in (w, w.bfloat16()):
        codes, scales = quantise(weight)
        error = (dequantise(codes, scales) - weight.float()).abs()
        assert (error <= scales[:, None] * 0.5001).all()
        assert (codes.abs().amax(1) == 127).all()


def test_rows_of_zeros_and_next_to_nothing() -> None:
    w = torch.zeros(3, 8)
    w[1, 3] = 1e-44
    assert torch.equal(dequantise(*quantise(w)), torch.zeros(3, 8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    w = torch.ones(3, 8)
    w[1, 3] = bad
    with pytest.raises(ValueError, match="aren't finite"):
        quantise(w)
