"""Cases of paged attention: ragged heads, gaps in positions, NaN wherever no cell is held."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from bench.cases.case import Case, Trial
from engine.kernels.attention import PAGE, attend
from engine.kernels.cpp.attention import NativeAttend
from engine.kernels.cpp.cells import Cells, Rows, point_at_pools
from engine.kernels.cpp.library import Context
from engine.kernels.memory import zeros

BOUND = 2e-6

F32, BF16 = torch.float32, torch.bfloat16


class Shape(NamedTuple):
    """`cells` a head at most; heads are ragged below that unless `even`. With `layers`, each call
    takes the next layer's cells: a real model's are too many for any cache.

    The queries are those of the last positions. Some way before them positions have gaps, as after
    an eviction.
    """

    batch: int
    queries: int
    heads: int
    group: int
    dim: int
    cells: int
    dtype: torch.dtype = F32
    bias: bool = False
    even: bool = False
    layers: int = 1
    unaligned: bool = False

    def __str__(self) -> str:
        marks = [name for name in ("bias", "unaligned") if getattr(self, name)]
        name = str(self.dtype).removeprefix("torch.")
        head = f"{self.batch}x{self.queries} {self.heads}x{self.group} d{self.dim} c{self.cells}"
        return " ".join((head, name, *marks))


class Inputs(NamedTuple):
    """What `attend` takes, of one layer or more: table and lengths have a first axis for it."""

    q: Tensor
    k: Tensor
    v: Tensor
    pos: Tensor
    table: Tensor  # [L, B, H, P]
    lengths: Tensor  # [L, B, H]
    q_pos: Tensor
    bias: Tensor | None

    def layer(self, index: int) -> tuple[Tensor | None, ...]:
        at = index % self.table.shape[0]
        return (*self[:4], self.table[at], self.lengths[at], self.q_pos, self.bias)

    def finite(self) -> Inputs:
        """With zeros for NaN, as the reference wants its pools."""
        k, v = self.k.nan_to_num(), self.v.nan_to_num()
        bias = None if self.bias is None else self.bias.nan_to_num()
        return self._replace(k=k, v=v, bias=bias)


def inputs(shape: Shape) -> Inputs:
    rng = torch.Generator().manual_seed(sum(shape[:6]))
    pages = -(-shape.cells // PAGE) + 1  # one more than any head needs
    owners = (shape.layers, shape.batch, shape.heads)
    count = 1 + shape.layers * shape.batch * shape.heads * pages  # page 0 belongs to nobody
    table = torch.randperm(count - 1, generator=rng).view(*owners, pages).add_(1).int()
    lengths = torch.full(owners, shape.cells)
    if not shape.even:
        least = min(shape.queries, shape.cells)
        lengths = torch.randint(least, shape.cells + 1, owners, generator=rng)
        lengths[:, 0, 0] = shape.cells
    cell = torch.arange(pages * PAGE)
    last = 4 * shape.cells  # the position of every head's last cell, and of the last query
    steps = torch.randint(1, 4, (*owners, pages * PAGE), generator=rng).cumsum(-1)
    recent = last + 1 + cell - lengths[..., None]
    pos = torch.where(cell < (lengths - shape.queries)[..., None], steps, recent)
    unheld = cell >= lengths[..., None]
    pos.masked_fill_(unheld, 0)
    pos_pool = torch.zeros(count, PAGE, dtype=torch.int32)
    pos_pool[table.flatten()] = pos.view(-1, PAGE).int()
    empty = torch.ones(count, PAGE, dtype=torch.bool)
    empty[table.flatten()] = unheld.view(-1, PAGE)
    table.masked_fill_(torch.arange(pages) * PAGE >= lengths[..., None], 0)
    k, v = (_pool(shape, count, empty, rng) for _ in range(2))
    bias = torch.randn(count, PAGE, generator=rng).masked_fill_(empty, torch.nan)
    q_pos = (last + 1 - shape.queries + torch.arange(shape.queries)).int()
    q = torch.randn(shape.batch, shape.queries, shape.heads * shape.group, shape.dim, generator=rng)
    q_pos = q_pos.repeat(shape.batch, 1)
    return Inputs(q, k, v, pos_pool, table, lengths.int(), q_pos, bias if shape.bias else None)


def _pool(shape: Shape, pages: int, empty: Tensor, rng: torch.Generator) -> Tensor:
    size, start = pages * PAGE * shape.dim, int(shape.unaligned)
    pool = zeros((size + start,), shape.dtype)[start:].view(pages, PAGE, shape.dim)
    pool.copy_(torch.randn(PAGE * pages, shape.dim, generator=rng).view_as(pool))
    return pool.masked_fill_(empty[..., None], torch.nan)


def work(shape: Shape, given: Inputs) -> tuple[float, float]:
    """Operations and bytes of one layer, as far as they can't be spared."""
    held = float(given.lengths[0].sum())
    unseen = shape.batch * shape.heads * shape.queries * (shape.queries - 1) / 2
    pairs = held * shape.queries - unseen
    cells = held * 2 * shape.dim * shape.dtype.itemsize
    return 4.0 * pairs * shape.group * shape.dim, cells + 2.0 * given.q.nbytes


class Layered(Protocol):
    """Inputs of several layers, which calls take in turns."""

    def layer(self, index: int) -> tuple[Any, ...]: ...
    def finite(self) -> Layered: ...


S = TypeVar("S")
G = TypeVar("G", bound=Layered)


def case_of(
    shape: S, inputs: Callable[[S], G], work: Callable[[S, G], tuple[float, float]], timed: bool
) -> Case:
    """The native op beside the reference, which doesn't get the NaN of what nobody may read."""

    def make(context: Context) -> Trial:
        native, given = NativeAttend(context), inputs(shape)
        finite = given.finite()
        ours, theirs = itertools.count(), itertools.count()
        return Trial(
            lambda: [native(*given.layer(next(ours)))],
            lambda: [attend(*finite.layer(next(theirs)))],
            *work(shape, given),
        )

    return Case("attend", str(shape), make, BOUND, timed)


def _case(shape: Shape, timed: bool = False) -> Case:
    return case_of(shape, inputs, work, timed)


class Ragged(NamedTuple):
    """Rows of several counts of tokens in one call."""

    counts: tuple[int, ...]
    heads: int
    group: int
    dim: int
    cells: int
    dtype: torch.dtype


def _ragged(shape: Ragged) -> Case:
    def make(context: Context) -> Trial:
        most = max(shape.counts)
        batch = len(shape.counts)
        given = inputs(Shape(batch, most, *shape[1:]))
        finite, mine = given.finite(), [slice(most - count, most) for count in shape.counts]
        q = torch.cat([given.q[b, part] for b, part in enumerate(mine)])
        pos = torch.cat([given.q_pos[b, part] for b, part in enumerate(mine)])
        first = torch.tensor([0, *itertools.accumulate(shape.counts)], dtype=torch.int32)

        def expected() -> Sequence[Tensor]:
            whole = attend(*finite.layer(0))  # type: ignore[arg-type]
            return [torch.cat([whole[b, part] for b, part in enumerate(mine)])]

        return Trial(lambda: [_call(context, given, q, pos, first)], expected)

    return Case("attend", f"rows of {shape.counts} {shape[1:5]}", make, BOUND)


def _call(context: Context, given: Inputs, q: Tensor, pos: Tensor, first: Tensor) -> Tensor:
    NativeAttend(context)  # declares the arguments
    _, batch, heads, width = given.table.shape
    cells = Cells(pos=given.pos.data_ptr())
    point_at_pools(cells, given.k, given.v, q.shape[2])
    row = torch.arange(batch)
    at = row * heads * width, row * heads
    rows = Rows(
        batch,
        heads,
        first.data_ptr(),
        pos.data_ptr(),
        given.table.data_ptr(),
        at[0].data_ptr(),
        width,
        given.lengths.data_ptr(),
        at[1].data_ptr(),
    )
    out = torch.empty_like(q)
    addresses = ctypes.addressof(cells), ctypes.addressof(rows)
    status = context.lib.taut_attend(
        context.handle, *addresses, q.shape[1], q.data_ptr(), out.data_ptr()
    )
    assert status == 0
    return out


_ODD = (
    Shape(1, 1, 2, 1, 16, 1),
    Shape(3, 1, 2, 2, 32, 40),
    Shape(5, 1, 3, 3, 64, 300),
    Shape(2, 1, 1, 8, 80, 129, bias=True),
    Shape(4, 1, 2, 7, 64, 129, BF16),
    Shape(2, 1, 2, 4, 128, 1000, BF16, bias=True),
    Shape(1, 1, 1, 100, 32, 200),
    Shape(2, 5, 2, 1, 96, 128, unaligned=True),
    Shape(2, 5, 2, 3, 128, 129, BF16, unaligned=True),
    Shape(1, 33, 3, 2, 48, 640),
    Shape(2, 33, 2, 7, 64, 150, bias=True),
    Shape(1, 70, 1, 5, 256, 70, BF16),
    Shape(1, 200, 2, 1, 112, 500),
)

SMOLLM2, QWEN2 = (3, 3, 64), (2, 7, 64)
"""Heads, group and dimensions."""

SIZES = ((1, 1, 2048, 24), (32, 1, 256, 8), (1, 512, 2048, 1))
"""Batch, queries, cells and layers of timed cases."""

_TIMED = tuple(
    Shape(batch, queries, *model, cells, dtype, even=True, layers=layers)
    for model in (SMOLLM2, QWEN2)
    for batch, queries, cells, layers in SIZES
    for dtype in (F32, BF16)
)

CASES = [
    *(_case(shape) for shape in _ODD),
    _ragged(Ragged((1, 5, 0, 33, 1), 2, 3, 64, 300, F32)),
    _ragged(Ragged((70, 1, 1, 2), 3, 7, 32, 400, BF16)),
    *(_case(shape, timed=True) for shape in _TIMED),
]
