"""Native norms, rotation with append, and statistics of logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cases.case import Case, error
from bench.cases.check import gap, poisoned
from bench.cases.rows import CASES
from engine.kernels.cpp import library
from engine.kernels.cpp.library import Context
from engine.kernels.cpp.rows import NativeRows
from engine.kernels.rows import rms_norm, row_stats

Contexts = tuple[Context, Context]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.name}")
def test_equals_its_reference(case: Case, context: Context) -> None:
    assert gap(case, context) <= case.bound


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 40), st.integers(1, 3000))
def test_rows_keep_their_bits_in_any_company(rows: int, width: int) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width))
    weight = torch.ones(width)
    for set in library.available():
        one, two = (NativeRows(library.opened(threads, set)) for threads in (1, 2))
        with poisoned():
            normed, stats = two.rms_norm(x, weight, 1e-6), two.row_stats(x)
        assert error([normed], [rms_norm(x, weight, 1e-6)]) < 1e-6
        assert error(stats, row_stats(x)) < 2e-6
        for row in {0, rows // 2, rows - 1}:
            own = slice(row, row + 1)
            assert torch.equal(one.rms_norm(x[own], weight, 1e-6), normed[own])
            for alone, together in zip(one.row_stats(x[own]), stats, strict=True):
                assert torch.equal(alone, together[own])


def test_long_rows_keep_their_bits_with_more_threads(both: Contexts) -> None:
    logits = 3 * torch.randn(3, 100_003, generator=torch.Generator().manual_seed(2))
    one, two = (NativeRows(context).row_stats(logits) for context in both)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_entropy_of_equals_is_exact(context: Context) -> None:
    stats = NativeRows(context).row_stats(torch.full((2, 1024), 7.0))
    assert stats.best.tolist() == [0, 0]
    assert error([stats.entropy], [torch.full((2,), 1024.0).log()]) < 1e-6


def test_a_bfloat16_rounds_to_even_and_never_to_infinity_by_itself(context: Context) -> None:
    exact = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 1e-40] * 4)
    heads = exact.repeat(1, 3, 1)
    pools = [torch.zeros(1, 16, 16, dtype=torch.bfloat16) for _ in range(2)]
    flat = torch.ones(1, 8), torch.zeros(1, 8)
    cells = torch.tensor([[5]])
    NativeRows(context).rotate_append(heads, None, 1e-6, *flat, pools[0], pools[1], cells)
    for pool in pools:
        assert torch.equal(pool[0, 5], exact.bfloat16())
        assert not pool[0, :5].any()
        assert not pool[0, 6:].any()


def test_bad_input_is_named(best: Context) -> None:
    rows = NativeRows(best)
    with pytest.raises(ValueError, match="x must be a contiguous float32"):
        rows.rms_norm(torch.zeros(4, 8, dtype=torch.float64), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="weight must be"):
        rows.rms_norm(torch.zeros(4, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match="logits must be"):
        rows.row_stats(torch.zeros(8, 4).T)
