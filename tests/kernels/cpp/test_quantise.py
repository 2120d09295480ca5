"""Native quantisation to NVFP4: every case, and values at and around every boundary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bench.cases.case import Case
from bench.cases.check import gap
from bench.cases.quantise import CASES, quantised
from engine.kernels import nvfp4
from engine.kernels.cpp.library import Context
from engine.kernels.nvfp4 import MAGNITUDES, QUANTISE, decode_e4m3


@pytest.mark.parametrize("case", [c for c in CASES if not c.timed], ids=lambda case: case.name)
def test_has_its_reference_s_bits(case: Case, best: Context) -> None:
    assert gap(case, best) == 0.0


def same(weight: Tensor) -> None:
    for native, plain in zip(quantised("cpp", weight), quantised("reference", weight), strict=True):
        assert torch.equal(native, plain)


def test_codes_at_and_around_every_middle(best: Context) -> None:
    points = torch.tensor(MAGNITUDES)
    points = torch.cat((points, (points[1:] + points[:-1]) / 2))
    near = [points, *(torch.nextafter(points, torch.tensor(to)) for to in (torch.inf, -torch.inf))]
    values = torch.cat(near + [-v for v in near])
    weight = torch.zeros(len(values), 16)
    weight[:, 0], weight[:, 1] = 6 * 448.0, values  # the scale is 448, the tensor's 1
    weight[:, 1] *= 448.0
    same(weight)


def test_scales_at_and_around_every_middle(best: Context) -> None:
    scales = decode_e4m3(torch.arange(0x7F, dtype=torch.uint8))
    points = torch.cat((scales, (scales[1:] + scales[:-1]) / 2))
    near = [points, *(torch.nextafter(points, torch.tensor(to)) for to in (torch.inf, 0.0))]
    weight = torch.cat(near)[:, None].repeat(1, 16) * 6
    weight[0] = 6 * 448.0
    same(weight)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused(poison: float, best: Context) -> None:
    weight = torch.ones(3, 32)
    weight[1, 17] = poison
    with pytest.raises(ValueError, match="aren't finite"):
        nvfp4.quantise(weight)


def test_a_search_is_the_reference_s() -> None:
    assert dict(QUANTISE.reasons("mse"))["cpp"] == "doesn't search scales by mse"
