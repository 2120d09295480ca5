"""NVFP4 against its definition: every code, every boundary, values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels import nvfp4
from engine.kernels.nvfp4 import BLOCK, MAGNITUDES, Quantised, dequantise, quantise

INF = torch.tensor(torch.inf)


def values_of(q: Quantised) -> Tensor:
    return dequantise(q.codes, q.blocks, torch.full((len(q.codes),), q.scale))


def codes_of(q: Quantised) -> Tensor:
    """One a weight, [out, in]."""
    return torch.stack((q.codes & 15, q.codes >> 4), -1).flatten(1)


def matrix(out: int, ins: int, seed: int = 0) -> Tensor:
    return torch.randn(out, ins, generator=torch.Generator().manual_seed(seed))


def nearest(value: float, grid: list[float]) -> int:
    """Index of the nearest point, the even one of two as near."""
    return min(range(len(grid)), key=lambda i: (abs(value - grid[i]), i % 2))


def around(points: Tensor) -> Tensor:
    return torch.cat((torch.nextafter(points, -INF), points, torch.nextafter(points, INF)))


def test_e4m3_bytes_are_torchs() -> None:
    every = torch.arange(256).to(torch.uint8)
    expected = every.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(nvfp4.decode_e4m3(every), expected, rtol=0, atol=0, equal_nan=True)


def test_e4m3_rounds_to_the_nearest_and_ties_to_even_at_every_boundary() -> None:
    grid = nvfp4.decode_e4m3(torch.arange(127).to(torch.uint8))
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([449.0, 464.0, 1e6])))
    points = around(points).clamp(min=0)
    expected = [nearest(v, grid.tolist()) for v in points.tolist()]
    assert nvfp4.encode_e4m3(points).tolist() == expected


def test_e2m1_rounds_to_the_nearest_and_ties_to_even_at_every_boundary() -> None:
    grid = torch.tensor(MAGNITUDES)
    middles = (grid[1:] + grid[:-1]) / 2
    points = around(torch.cat((grid[1:], middles, torch.tensor([1e-30, 7.0, 1e6]))))
    expected = torch.tensor([nearest(v, list(MAGNITUDES)) for v in points.tolist()])
    assert torch.equal(nvfp4.encode_e2m1(points).long(), expected)
    assert torch.equal(nvfp4.encode_e2m1(-points).long(), expected + 8)
    assert nvfp4.encode_e2m1(middles).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert nvfp4.encode_e2m1(torch.tensor([0.0, -0.0])).tolist() == [0, 8]


def test_worked_by_hand() -> None:
    """The greatest magnitude is 6 * 448, so the tensor scale is 1 and the first block's is 448."""
    first = [2688.0, 1344.0, 448.0, -224.0, 100.0, -100.0, 560.0, 336.0] + [0.0] * 8
    second = [-12.0, 3.0, 0.5, 1.5, 5.0, 7.0, 0.0, 11.0] + [0.0] * 8  # amax 12: scale 2
    q = quantise(torch.tensor([first + second]))
    assert (q.scale, q.inverse) == (1.0, 1.0)
    assert q.blocks.tolist() == [[0x7E, 0x40]]
    assert codes_of(q)[0, :8].tolist() == [7, 5, 2, 9, 0, 8, 2, 2]
    assert codes_of(q)[0, 16:24].tolist() == [15, 3, 0, 2, 4, 6, 0, 7]
    assert q.codes[0, :4].tolist() == [0x57, 0x92, 0x80, 0x22]
    w = values_of(q)[0]
    assert w[:8].tolist() == [2688.0, 1344.0, 448.0, -224.0, 0.0, 0.0, 448.0, 448.0]
    assert w[16:24].tolist() == [-12.0, 3.0, 0.0, 2.0, 4.0, 8.0, 0.0, 12.0]


def test_dequantised_is_the_real_product_rounded_once() -> None:
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (40, 24), generator=rng).to(torch.uint8)
    blocks = torch.randint(0, 127, (40, 3), generator=rng).to(torch.uint8)
    scales = torch.rand(40, generator=rng) * 1e-3
    signed = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    code = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    block = nvfp4.decode_e4m3(blocks).double().repeat_interleave(BLOCK, 1)
    exact = signed[code] * block * scales.double()[:, None]  # 30 bits: exact in float64
    assert torch.equal(dequantise(codes, blocks, scales), exact.float())


@pytest.mark.parametrize("search", ["max", "mse"])
def test_every_code_is_the_nearest_under_its_scale(search: nvfp4.ScaleSearch) -> None:
    w = matrix(6, 64)
    q = quantise(w, search)
    step = nvfp4.decode_e4m3(q.blocks).mul_(q.scale).repeat_interleave(BLOCK, 1)
    scaled = (w / step).abs().flatten().tolist()
    expected = [nearest(v, list(MAGNITUDES)) for v in scaled]
    assert (codes_of(q) & 7).flatten().tolist() == expected
    assert torch.equal(codes_of(q) >= 8, w < 0)


def test_plain_scales_put_the_greatest_magnitude_of_a_block_at_six() -> None:
    w = matrix(5, 96, seed=3)
    q = quantise(w)
    amax = w.view(5, -1, BLOCK).abs().amax(-1)
    wanted = amax / 6 * (2688 / w.abs().max())
    grid = nvfp4.decode_e4m3(torch.arange(127).to(torch.uint8)).tolist()
    assert q.blocks.flatten().tolist() == [nearest(v, grid) for v in wanted.flatten().tolist()]
    assert int(q.blocks.max()) == 0x7E
    assert math.isclose(q.scale, float(w.abs().max()) / 2688, rel_tol=1e-6)


def test_the_search_never_does_worse_and_mostly_better() -> None:
    w = matrix(20, 160)
    errors = [
        (values_of(quantise(w, search)) - w).view(20, -1, BLOCK).square().sum(-1)
        for search in ("max", "mse")
    ]
    assert (errors[1] <= errors[0]).all()
    assert float(errors[1].sum()) < 0.8 * float(errors[0].sum())


def test_blocks_of_zeros_and_blocks_too_small_for_a_scale() -> None:
    w = torch.zeros(1, 64)
    w[0, 0] = 2688.0  # tensor scale 1
    w[0, 16] = 6 * 2.0**-10  # its scale would round to 0: a tie, to the even 0
    w[0, 32] = 1e-9
    q = quantise(w)
    assert q.blocks.tolist() == [[0x7E, 1, 1, 1]]
    assert values_of(q)[0, [0, 16, 32, 48]].tolist() == [2688.0, 3 * 2.0**-9, 0.0, 0.0]
    assert torch.equal(values_of(quantise(torch.zeros(3, 32))), torch.zeros(3, 32))
    assert values_of(quantise(torch.zeros(0, 32))).shape == (0, 32)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 3e38])
def test_any_magnitude_that_is_finite(size: float) -> None:
    w = torch.full((2, 16), size)
    w[:, 1::2] *= -0.5
    torch.testing.assert_close(values_of(quantise(w)) / size, w / size, rtol=0.07, atol=0.01)


@settings(max_examples=40, deadline=None)
@given(
    out=st.integers(1, 5),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 1 << 30),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    search=st.sampled_from(["max", "mse"]),
)
def test_round_trips(
    out: int, blocks: int, seed: int, spread: float, search: nvfp4.ScaleSearch
) -> None:
    """Nothing is further off than half of the coarsest step of its block, whatever the spread of
    magnitudes; what is on the grid already comes back as it was."""
    rng = torch.Generator().manual_seed(seed)
    sizes = (spread * torch.randn(out, blocks, 1, generator=rng)).exp()
    w = (torch.randn(out, blocks, BLOCK, generator=rng) * sizes).flatten(1)
    q = quantise(w, search)
    back = values_of(q)
    assert torch.isfinite(back).all()
    if search == "mse":  # the greatest scale may be another one then, and the tensor's too
        return
    amax = w.view(out, -1, BLOCK).abs().amax(-1).repeat_interleave(BLOCK, 1)
    least = 6 * q.scale * 2.0**-10  # half a step of the smallest block scales, times 6
    assert ((back - w).abs() <= amax / 5.5 + least).all()
    if int((codes_of(q) & 7).view(out, -1, BLOCK).amax(-1).min()) == 7:
        torch.testing.assert_close(values_of(quantise(back)), back, rtol=1e-6, atol=0.0)


def test_neither_dtype_nor_layout_nor_chunk_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    w = matrix(50, 48).bfloat16()
    expected = quantise(w)
    for other in (w.float(), w.T.contiguous().T, w.half().bfloat16()):
        assert torch.equal(quantise(other).codes, expected.codes)
        assert torch.equal(quantise(other).blocks, expected.blocks)
    monkeypatch.setattr(nvfp4, "_CHUNK", 100)
    assert torch.equal(quantise(w).codes, expected.codes)
    before = w.clone()
    quantise(w, "mse")
    assert torch.equal(w, before), "it may be a view of a file"


@pytest.mark.parametrize(
    ("weight", "search", "words"),
    [
        (torch.ones(2, 24), "max", "isn't a multiple of it; use int8 or bf16"),
        (torch.ones(16), "max", "weight must be a float matrix"),
        (torch.ones(2, 16, dtype=torch.int8), "max", "weight must be a float matrix"),
        (torch.full((2, 16), math.nan), "max", "values that aren't finite"),
        (torch.tensor([[1.0] * 15 + [math.inf]]), "max", "values that aren't finite"),
        (torch.tensor([[1.0] * 15 + [-math.inf]]), "mse", "values that aren't finite"),
        (torch.ones(2, 16), "best", "scale must be one of max, mse, not 'best'"),
    ],
)
def test_refused_in_words(weight: Tensor, search: nvfp4.ScaleSearch, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantise(weight, search)
