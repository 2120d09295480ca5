"""Native attention over packed pages: every case, tails of every length, and the same bits in
whatever company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.cases.attention import Shape
from bench.cases.case import Case, error
from bench.cases.check import gap, poisoned
from bench.cases.packed import CASES, PackedInputs, PackedShape, inputs
from engine.kernels.attention import ATTENTION, AttentionSpec, attend
from engine.kernels.cpp.attention import NativeAttend
from engine.kernels.cpp.library import Context
from engine.kernels.packed import BITS, PACK

Contexts = tuple[Context, Context]

SMALL = [case for case in CASES if not case.timed]
TIMED = [case for case in CASES if case.timed]
COMPANY = (
    PackedShape(Shape(4, 1, 2, 3, 64, 300), 4, 6),
    PackedShape(Shape(3, 40, 2, 2, 48, 90, torch.bfloat16, bias=True), 8, 3),
    PackedShape(Shape(1, 1, 1, 7, 128, 150), 2, 12),
)


def native(context: Context, given: PackedInputs) -> Tensor:
    return NativeAttend(context)(*given.layer(0))  # type: ignore[arg-type]


def expected(given: PackedInputs) -> Tensor:
    return attend(*given.finite().layer(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_equals_its_reference(case: Case, context: Context) -> None:
    assert gap(case, context) <= case.bound


@pytest.mark.parametrize("case", TIMED, ids=lambda case: case.name)
def test_equals_its_reference_at_a_model_s_size(case: Case, best: Context) -> None:
    assert gap(case, best) <= case.bound


@pytest.mark.parametrize("bits", BITS)
def test_tails_and_fills_of_every_length(bits: int, context: Context) -> None:
    cells = 2 * PACK
    given = inputs(PackedShape(Shape(cells, 1, 1, 2, 32, cells, bias=True, even=True), bits, 1))
    given.tail.lengths[0, :, 0] = torch.arange(cells)
    given.packed.fill[0, :, 0, 0] = torch.arange(cells) % (PACK + 1)
    with poisoned():
        found = native(context, given)
    assert error([found], [expected(given)]) < 2e-6
    assert not found[0].any()


@pytest.mark.parametrize("shape", COMPANY, ids=str)
def test_bits_do_not_depend_on_threads(shape: PackedShape, both: Contexts) -> None:
    given = inputs(shape)
    one, two = (native(context, given) for context in both)
    assert torch.equal(one, two)


@pytest.mark.parametrize("shape", COMPANY, ids=str)
def test_bits_do_not_depend_on_the_batch_or_the_tables(shape: PackedShape, both: Contexts) -> None:
    given = inputs(shape)
    together = native(both[1], given)
    for b in range(shape.tail.batch):
        own = slice(b, b + 1)
        filled = int((given.packed.fill[0, b] > 0).sum(-1).max())
        tail = given.tail._replace(
            q=given.tail.q[own],
            table=given.tail.table[:, own],
            lengths=given.tail.lengths[:, own],
            q_pos=given.tail.q_pos[own],
        )
        packed = given.packed._replace(
            table=given.packed.table[:, own, :, :filled], fill=given.packed.fill[:, own, :, :filled]
        )
        assert torch.equal(native(both[b % 2], PackedInputs(tail, packed)), together[own])


@pytest.mark.parametrize("chunk", [1, 7])
def test_bits_do_not_depend_on_the_chunk(chunk: int, both: Contexts) -> None:
    shape = COMPANY[1].tail
    given, packed = inputs(COMPANY[1])
    whole = native(both[1], PackedInputs(given, packed))
    for start in range(0, shape.queries, chunk):
        part = slice(start, start + chunk)
        later = max(shape.queries - start - chunk, 0)  # cells that aren't there yet
        held = (given.lengths - later).clamp_(min=0)
        piece = given._replace(q=given.q[:, part], q_pos=given.q_pos[:, part], lengths=held)
        assert torch.equal(native(both[start % 2], PackedInputs(piece, packed)), whole[:, part])


def test_no_packed_pages_yet_is_as_if_there_were_none(context: Context) -> None:
    given = inputs(COMPANY[1])
    given.packed.fill.zero_()
    plain = NativeAttend(context)(*given.tail.layer(0))  # type: ignore[arg-type]
    assert torch.equal(native(context, given), plain)


@pytest.mark.parametrize("bits", BITS)
def test_serves_every_width(bits: int) -> None:
    spec = AttentionSpec(64, 3, "cpu", torch.float32, torch.bfloat16, bits=bits)
    assert "packed" not in str(dict(ATTENTION.reasons(spec))["cpp"])
    other = dict(ATTENTION.reasons(spec._replace(bits=3)))["cpp"]
    assert "2, 4 and 8 bits, not of 3" in str(other)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"k_grid": torch.zeros(1, 2, 64, dtype=torch.float16)}, "packed k_grid"),
        ({"pos": torch.zeros(1, PACK, dtype=torch.int64)}, "packed pos"),
        ({"fill": torch.zeros(4, 2, 6, dtype=torch.int64)}, "packed fill"),
    ],
)
def test_what_it_cannot_read_is_named(change: dict[str, Any], named: str, best: Context) -> None:
    given = inputs(COMPANY[0])
    whole = given.packed._replace(table=given.packed.table[0], fill=given.packed.fill[0])
    with pytest.raises(ValueError, match=f"{named} must be a contiguous"):
        NativeAttend(best)(*given.tail.layer(0), whole._replace(**change))  # type: ignore[arg-type,call-arg]
