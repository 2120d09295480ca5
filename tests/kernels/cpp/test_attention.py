"""Native attention: every case, and the same bits in whatever company."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.cases.attention import CASES, Inputs, Shape, inputs
from bench.cases.case import Case, error
from bench.cases.check import gap, poisoned
from engine.kernels.attention import ATTENTION, AttentionSpec, attend
from engine.kernels.cpp import attention, library
from engine.kernels.cpp.attention import NativeAttend
from engine.kernels.cpp.library import Context

Contexts = tuple[Context, Context]

SMALL = [case for case in CASES if not case.timed]
TIMED = [case for case in CASES if case.timed]
COMPANY = (
    Shape(4, 1, 2, 7, 64, 300, torch.bfloat16),
    Shape(3, 50, 2, 3, 48, 390, bias=True),
    Shape(1, 1, 1, 2, 128, 1500),
)


def native(context: Context, given: Inputs) -> Tensor:
    return NativeAttend(context)(*given.layer(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_its_reference(case: Case, context: Context) -> None:
    assert gap(case, context) <= case.bound


@pytest.mark.parametrize("case", TIMED, ids=lambda case: case.name)
def test_equals_its_reference_at_a_model_s_size(case: Case, best: Context) -> None:
    assert gap(case, best) <= case.bound


@pytest.mark.parametrize("shape", COMPANY, ids=str)
def test_bits_do_not_depend_on_threads(shape: Shape, both: Contexts) -> None:
    given = inputs(shape)
    one, two = (native(context, given) for context in both)
    assert torch.equal(one, two)


@pytest.mark.parametrize("shape", COMPANY, ids=str)
def test_bits_do_not_depend_on_the_batch_or_the_table(shape: Shape, both: Contexts) -> None:
    given = inputs(shape)
    together = native(both[1], given)
    for b, context in itertools.product(range(shape.batch), both):
        own = slice(b, b + 1)
        width = -(-int(given.lengths[0, b].max()) // 16)
        alone = given._replace(
            q=given.q[own],
            table=given.table[:, own, :, :width],
            lengths=given.lengths[:, own],
            q_pos=given.q_pos[own],
        )
        assert torch.equal(native(context, alone), together[own])


@pytest.mark.parametrize("chunk", [1, 7])
def test_bits_do_not_depend_on_the_chunk(chunk: int, both: Contexts) -> None:
    shape = COMPANY[1]
    given = inputs(shape)
    whole = native(both[1], given)
    for start in range(0, shape.queries, chunk):
        part = slice(start, start + chunk)
        later = max(shape.queries - start - chunk, 0)  # cells that aren't there yet
        piece = given._replace(
            q=given.q[:, part], q_pos=given.q_pos[:, part], lengths=given.lengths - later
        )
        assert torch.equal(native(both[start % 2], piece), whole[:, part])


@settings(max_examples=30, deadline=None)
@given(
    st.builds(
        Shape,
        batch=st.integers(1, 3),
        queries=st.integers(1, 20),
        heads=st.integers(1, 3),
        group=st.integers(1, 9),
        dim=st.integers(1, 16).map(lambda n: 16 * n),
        cells=st.integers(20, 300),
        dtype=st.sampled_from((torch.float32, torch.bfloat16)),
        bias=st.booleans(),
        unaligned=st.booleans(),
        even=st.booleans(),
        layers=st.just(1),
    )
)
def test_odd_shapes(shape: Shape) -> None:
    given = inputs(shape)
    expected = attend(*given.finite().layer(0))  # type: ignore[arg-type]
    for set in library.available():
        with poisoned():
            found = [native(library.opened(threads, set), given) for threads in (1, 2)]
        assert torch.equal(found[0], found[1])
        assert error(found[:1], [expected]) < 2e-6


def test_a_query_that_sees_nothing_gets_zeros(context: Context) -> None:
    given = inputs(COMPANY[1])
    given.q_pos[1, 2] = -1
    given.lengths[0, 2, 0] = 0
    out = native(context, given)
    assert not out[1, 2].any()
    assert not out[2, :, :3].any()
    assert out.isfinite().all()
    assert out[2, :, 3:].any()


def test_a_key_that_is_nan_shows_where_it_is_seen(context: Context) -> None:
    given = inputs(COMPANY[1])
    given.k[given.table[0, 0, 1, 0], 0] = torch.nan
    out = native(context, given)
    assert out[0, :, 3:].isnan().all()
    assert out[0, :, :3].isfinite().all()
    assert out[1:].isfinite().all()


def test_a_bias_of_minus_infinity_hides_a_cell(context: Context) -> None:
    given = inputs(COMPANY[1])
    assert given.bias is not None
    hidden = given.table[0, 0, 0, :2].long()
    given.bias[hidden] = -torch.inf
    given.v[hidden] *= 1e6
    bias = given.bias.nan_to_num(neginf=-torch.inf)
    expected = attend(*given.finite()._replace(bias=bias).layer(0))  # type: ignore[arg-type]
    assert error([native(context, given)], [expected]) < 2e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda"}, "not on cuda"),
        ({"dtype": torch.bfloat16}, "float32, not bfloat16"),
        ({"cell_dtype": torch.float16}, "cells, not float16"),
        ({"head_dim": 72}, "multiple of 16"),
        ({"head_dim": 272}, "at most 256"),
    ],
)
def test_refuses_in_words(change: dict[str, Any], words: str) -> None:
    spec = AttentionSpec(64, 3, "cpu", torch.float32, torch.float32)._replace(**change)
    assert words in str(dict(ATTENTION.reasons(spec))["cpp"])


def test_serves_what_it_does_not_refuse(best: Context) -> None:
    spec = AttentionSpec(64, 7, "cpu", torch.float32, torch.bfloat16)
    assert attention.refuses(spec) is None
    assert isinstance(attention.build(spec), NativeAttend)


@pytest.mark.parametrize(
    ("name", "named"), [("k", "v_pool"), ("pos", "pos_pool"), ("bias", "bias_pool")]
)
def test_a_pool_that_it_cannot_read_is_named(name: str, named: str, best: Context) -> None:
    given = inputs(COMPANY[1])
    with pytest.raises(ValueError, match=f"{named} must be a contiguous"):
        native(best, given._replace(**{name: getattr(given, name)[:-1]}))
