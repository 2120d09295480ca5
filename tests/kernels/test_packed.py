"""Packed cells against their definition, one number at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.packed import (
    BITS,
    PACK,
    codes_of_keys,
    codes_of_values,
    keys_of_codes,
    pack_keys,
    pack_values,
    page_bytes,
    unpack_keys,
    unpack_values,
    value_channels,
    values_of_codes,
)

each_bits = pytest.mark.parametrize("bits", BITS)


def cells(seed: int, pages: int, dim: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    spread = 10 ** torch.randn(pages, 1, dim, generator=rng)
    return torch.randn(pages, PACK, dim, generator=rng) * spread * scale + shift


def nearest(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What a run of numbers that share a grid comes back as; the run is x's last axis."""
    least = x.amin(-1, keepdim=True).half().float()
    step = ((x.amax(-1, keepdim=True) - least) / (2**bits - 1)).clamp(0, 65504).half().float()
    grid = least + step * torch.arange(2**bits)  # [..., codes]
    best = (x[..., None].double() - grid[..., None, :].double()).abs().argmin(-1)
    out: torch.Tensor = grid.expand(*x.shape[:-1], -1).gather(-1, best)
    return out


def assert_nearest(got: torch.Tensor, best: torch.Tensor, x: torch.Tensor) -> None:
    """As near as the best, but for float32's rounding where two are equally near."""
    close = (got - x).abs() <= (best - x).abs() + 1e-6 * x.abs().clamp(min=1e-4)
    assert close.all()
    assert (got == best).float().mean() > 0.95


@each_bits
@pytest.mark.parametrize("dim", [8, 16, 48, 64, 80, 128])
def test_a_number_becomes_the_nearest_of_its_grid(bits: int, dim: int) -> None:
    full = torch.tensor([PACK, PACK])
    for scale, shift in ((1.0, 0.0), (100.0, -300.0), (1e-3, 2.0)):
        x = cells(dim + bits, 2, dim, scale, shift).clamp(-60000, 60000)
        keys = unpack_keys(*pack_keys(x, full, bits), bits)
        assert_nearest(keys, nearest(x.mT, bits).mT, x)
        values = unpack_values(*pack_values(x, full, bits), bits)
        runs = x.reshape(*x.shape[:2], -1, value_channels(dim))
        assert_nearest(values, nearest(runs, bits).flatten(2), x)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    dim=st.sampled_from([8, 16, 64]),
    count=st.integers(1, PACK),
    seed=st.integers(0, 10_000),
    exponent=st.integers(-6, 4),
)
def test_errors_are_half_a_step_and_absent_cells_dont_count(
    bits: int, dim: int, count: int, seed: int, exponent: int
) -> None:
    x = cells(seed, 1, dim, 10.0**exponent).clamp(-60000, 60000)
    there = torch.tensor([count])
    junk = x.clone()
    junk[:, count:] = torch.nan
    for pack, unpack, axis in (
        (pack_keys, unpack_keys, 1),
        (pack_values, unpack_values, 2),
    ):
        codes, grid = pack(x, there, bits)
        assert all(
            torch.equal(a, b) for a, b in zip(pack(junk, there, bits), (codes, grid), strict=True)
        )
        back = unpack(codes, grid, bits)
        assert back.isfinite().all()
        own = x[:, :count]
        runs = own if axis == 1 else own.reshape(*own.shape[:2], -1, value_channels(dim))
        along = 1 if axis == 1 else 3
        span = runs.amax(along, keepdim=True) - runs.amin(along, keepdim=True)
        largest = runs.abs().amax(along, keepdim=True)
        # half a step; and the roundings of step and minimum to float16 at the ends of the grid
        bound = span * (0.5 / (2**bits - 1) + 2**-10) + largest * 2**-10 + 2.0**-16
        error = (back[:, :count] - own).abs()
        assert (error <= bound.expand_as(runs).reshape(own.shape)).all()


@each_bits
def test_equal_numbers_and_huge_ones(bits: int) -> None:
    full = torch.tensor([PACK])
    same = torch.full((1, PACK, 16), 0.5)
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        assert torch.equal(unpack(*pack(same, full, bits), bits), same)
        huge = torch.randn(1, PACK, 16) * 1e6
        huge[0, 0, 0], huge[0, 1, 1] = torch.inf, torch.nan
        assert unpack(*pack(huge, full, bits), bits).isfinite().all()


@each_bits
def test_codes_lie_where_the_module_says(bits: int) -> None:
    dim, lanes = 16, 16
    codes = torch.randint(0, 2**bits, (3, PACK, dim), dtype=torch.uint8)
    keys, values = keys_of_codes(codes, bits), values_of_codes(codes, bits)
    assert torch.equal(codes_of_keys(keys, bits), codes)
    assert torch.equal(codes_of_values(values, bits), codes)

    def code(packed: torch.Tensor, page: int, index: int) -> int:
        number = int.from_bytes(bytes(packed[page].tolist()), "little")
        return int(number >> bits * index & (2**bits - 1))

    for page, cell, d in ((0, 0, 0), (1, 17, 5), (2, 63, 15), (0, 33, 1)):
        lane, which = cell % lanes, cell // lanes
        assert code(keys, page, (d * lanes + lane) * 4 + which) == codes[page, cell, d]
        quad, which = cell // 4, cell % 4
        assert code(values, page, (quad * dim + d) * 4 + which) == codes[page, cell, d]


def test_bytes_of_a_page() -> None:
    for bits in BITS:
        for dim in (16, 64, 80, 128):
            x, full = cells(0, 1, dim), torch.tensor([PACK])
            parts = (*pack_keys(x, full, bits), *pack_values(x, full, bits))
            assert sum(part.nbytes for part in parts) == page_bytes(bits, dim)
    assert page_bytes(2, 128) == 64 * (64 + 16)  # the paper's: 64 of codes and 16 beside, a cell
