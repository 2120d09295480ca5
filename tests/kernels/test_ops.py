"""Every op against its naive definition, and against itself in other company."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.kernels.attention import ATTENTION, PAGE, SPLIT, AttentionSpec, attend
from engine.kernels.dispatch import select
from engine.kernels.formats import DenseParts
from engine.kernels.linear import LINEAR, LinearSpec
from tests.kernels.invariance import assert_same_rows


class Attention(NamedTuple):
    """A case: `cells` a head at most; heads are ragged below that."""

    batch: int
    queries: int
    heads: int
    group: int
    dim: int
    cells: int
    pool: torch.dtype = torch.float32

    def inputs(self) -> tuple[Tensor, ...]:
        """Pages in random order, some heads short; the queries are at the last positions.

        Positions have gaps, as after an eviction; cells that aren't held look old and are large.
        """
        b, m, h, g, d, cells, dtype = self
        rng = torch.Generator().manual_seed(sum(self[:6]))
        pages = -(-cells // PAGE)
        count = 1 + b * h * pages  # page 0 belongs to nobody
        pools = [torch.randn(count, PAGE, d, generator=rng).to(dtype) for _ in range(2)]
        table = torch.randperm(count - 1, generator=rng).view(b, h, pages).add_(1).int()
        lengths = torch.randint(m, cells + 1, (b, h), generator=rng)
        lengths[0, 0] = cells
        steps = torch.randint(1, 4, (b, h, pages * PAGE), generator=rng).cumsum(-1)
        cell = torch.arange(pages * PAGE)
        last = 4 * cells  # the position of every head's last cell, and of the last query
        unheld = cell >= lengths[..., None]
        pos = torch.where(
            cell < (lengths - m)[..., None], steps, last + 1 + cell - lengths[..., None]
        ).masked_fill(unheld, 0)
        pos_pool = torch.zeros(count, PAGE, dtype=torch.int32)
        pos_pool[table.flatten()] = pos.view(-1, PAGE).int()
        for pool in pools:
            held = pool[table.flatten()]
            pool[table.flatten()] = held.masked_fill(unheld.view(-1, PAGE, 1), 1e4)
        q_pos = (last + 1 - m + torch.arange(m)).expand(b, m)
        q = torch.randn(b, m, h * g, d, generator=rng)
        return q, *pools, pos_pool, table, lengths.int(), q_pos.int()


ATTENTION_CASES = (
    Attention(1, 1, 2, 1, 16, 1),
    Attention(3, 1, 2, 2, 16, 40),
    Attention(5, 1, 3, 3, 64, 300),
    Attention(4, 1, 2, 7, 64, 129, torch.bfloat16),
    Attention(2, 5, 2, 1, 32, SPLIT),
    Attention(2, 5, 2, 3, 128, SPLIT + 1, torch.bfloat16),
    Attention(1, 33, 3, 2, 16, 5 * SPLIT),
    Attention(2, 33, 2, 7, 64, 150),
)

LINEAR_SHAPES = ((64, 64), (304, 64), (960, 576), (576, 1536), (130, 97), (512, 4864))
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 128)
DTYPES = (torch.float32, torch.bfloat16)


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, table: Tensor, lengths: Tensor, q_pos: Tensor
) -> Tensor:
    """The definition, one head of one sequence at a time, in float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[2] // table.shape[1]
    for b, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
        pages, length = table[b, head // group], lengths[b, head // group]
        keys, values, at = (pool[pages].flatten(0, 1)[:length] for pool in (k, v, pos))
        scores = q[b, :, head].double() @ keys.double().T / q.shape[3] ** 0.5
        scores = scores.masked_fill(at > q_pos[b, :, None], -torch.inf)
        out[b, :, head] = torch.softmax(scores, -1) @ values.double()
    return out


def nmse(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).square().sum() / want.double().square().sum())


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
@pytest.mark.parametrize("backend", [impl.backend for impl in ATTENTION.impls])
def test_attention_equals_its_definition(backend: str, case: Attention) -> None:
    spec = AttentionSpec(case.dim, case.group, "cpu", torch.float32, case.pool)
    impl = select(ATTENTION, spec, (backend,))
    inputs = case.inputs()
    assert nmse(impl.build(spec)(*inputs), naive_attention(*inputs)) < 1e-11


def test_attention_keeps_the_dtype_of_queries() -> None:
    q, *rest = ATTENTION_CASES[3].inputs()
    low = attend(q.bfloat16(), *rest)  # type: ignore[arg-type]
    assert low.dtype == torch.bfloat16
    assert nmse(low, naive_attention(q, *rest)) < 1e-4


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    *inputs, q_pos = ATTENTION_CASES[4].inputs()
    inputs.append(q_pos.clone())
    inputs[-1][1, 2] = -1
    out = attend(*inputs)  # type: ignore[arg-type]
    assert not out[1, 2].any()
    assert out.isfinite().all()


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_of_a_sequence_does_not_depend_on_the_batch(case: Attention) -> None:
    q, k, v, pos, table, lengths, q_pos = case.inputs()
    together = attend(q, k, v, pos, table, lengths, q_pos)
    for b in range(case.batch):
        own = table[b : b + 1, :, : -(-int(lengths[b].max()) // PAGE)]
        one = slice(b, b + 1)
        alone = attend(q[one], k, v, pos, own, lengths[one], q_pos[one])
        assert_same_rows(alone, together[one])


@pytest.mark.parametrize("case", [c for c in ATTENTION_CASES if c.queries > 1], ids=str)
@pytest.mark.parametrize("chunk", [1, 4])
def test_attention_of_a_query_does_not_depend_on_the_chunk(case: Attention, chunk: int) -> None:
    q, k, v, pos, table, lengths, q_pos = case.inputs()
    whole = attend(q, k, v, pos, table, lengths, q_pos)
    parts = []
    for start in range(0, case.queries, chunk):
        part = slice(start, start + chunk)
        held = lengths - max(case.queries - start - chunk, 0)  # later cells aren't there yet
        parts.append(attend(q[:, part], k, v, pos, table, held, q_pos[:, part]))
    assert_same_rows(torch.cat(parts, 1), whole)


def random_linear(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(sum(shape))
    out, ins = shape
    weight = torch.randn(out, ins, generator=rng) * ins**-0.5
    parts = (torch.randn(max(ROWS), ins, generator=rng), weight, torch.randn(out, generator=rng))
    x, w, b = (part.to(dtype) for part in parts)
    return x, w, b


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
@pytest.mark.parametrize("backend", [impl.backend for impl in LINEAR.impls])
def test_linear_equals_its_definition(
    backend: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    impl = _serving(backend, dtype)
    x, w, b = random_linear(shape, dtype)
    for bias in (None, b):
        linear = impl(LinearSpec("cpu", dtype), DenseParts(w, bias))
        assert torch.equal(linear.parts().weight, w)
        for rows in (0, 1, 2, 33):
            y = linear(x[:rows])
            want = x[:rows].double() @ w.T.double() + (0 if bias is None else bias.double())
            assert y.shape == want.shape
            assert y.dtype == dtype
            assert not rows or nmse(y, want) < (1e-12 if dtype == torch.float32 else 2e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", LINEAR_SHAPES, ids=str)
def test_linear_of_a_row_does_not_depend_on_the_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, w, b = random_linear(shape, dtype)
    spec = LinearSpec("cpu", dtype)
    linear = select(LINEAR, spec).build(spec, DenseParts(w, b))
    whole = linear(x)
    for rows in ROWS:
        assert_same_rows(linear(x[:rows]), whole[:rows], dtype)
        assert_same_rows(linear(x[-rows:]), whole[-rows:], dtype)


def test_onednn_refuses_in_words() -> None:
    reasons = [
        dict(LINEAR.reasons(spec))["onednn"]
        for spec in (
            LinearSpec("cuda", torch.float32),
            LinearSpec("cpu", torch.float16),
            LinearSpec("cpu", torch.float32, "nvfp4"),
        )
    ]
    assert "not on cuda" in str(reasons[0])
    assert "not float16" in str(reasons[1])
    assert "not as nvfp4" in str(reasons[2])


def _serving(backend: str, dtype: torch.dtype) -> Any:
    impl = next(impl for impl in LINEAR.impls if impl.backend == backend)
    reason = impl.refuses(LinearSpec("cpu", dtype))
    if reason is not None:
        pytest.skip(f"{backend}: {reason}")
    return impl.build
