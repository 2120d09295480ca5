"""Cases of attention over packed pages before plain ones: ragged pages, pages that lost cells, NaN
in grids and biases wherever no cell is held."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bench.cases import attention
from bench.cases.attention import BF16, F32, Shape
from bench.cases.case import Case
from engine.kernels.packed import BITS, PACK, PackedCells, pack_keys, pack_values, page_bytes


class PackedShape(NamedTuple):
    """`pages` packed ones a head at most, before the plain cells of `tail`: ragged, some of them
    partly filled, some cells later than the queries, unless `tail` is even."""

    tail: Shape
    bits: int
    pages: int

    def __str__(self) -> str:
        return f"{self.tail} after {self.pages} int{self.bits}"


class PackedInputs(NamedTuple):
    tail: attention.Inputs
    packed: PackedCells  # table and fill are [L, B, H, G]

    def layer(self, index: int) -> tuple[Tensor | PackedCells | None, ...]:
        at = index % len(self.packed.table)
        own = self.packed._replace(table=self.packed.table[at], fill=self.packed.fill[at])
        return *self.tail.layer(index), own

    def finite(self) -> PackedInputs:
        """With zeros for NaN."""
        pools = (None if pool is None else pool.nan_to_num() for pool in self.packed[:6])
        return PackedInputs(self.tail.finite(), PackedCells(*pools, *self.packed[6:]))  # type: ignore[arg-type,call-arg]


def inputs(shape: PackedShape) -> PackedInputs:
    tail = shape.tail
    given = attention.inputs(tail)
    rng = torch.Generator().manual_seed(sum(tail[:6]) + shape.bits)
    owners = (tail.layers, tail.batch, tail.heads)
    fill = torch.full((*owners, shape.pages), PACK)
    if not tail.even:
        some = torch.randint(1, 2 * PACK, fill.shape, generator=rng).clamp_(max=PACK)
        pages = torch.randint(shape.pages + 1, (*owners, 1), generator=rng)
        fill = some.masked_fill_(torch.arange(shape.pages) >= pages, 0)
        fill[:, 0, 0] = PACK
        given.lengths[:, -1, -1] = 0
    count = 1 + fill.numel()  # page 0 belongs to nobody
    table = torch.randperm(count - 1, generator=rng).view(fill.shape).add_(1)
    own = torch.zeros(count, dtype=torch.int64)
    own[table.flatten()] = fill.flatten()
    table.masked_fill_(fill == 0, 0)
    packed = _pools(shape, own, rng)
    table, fill = table.int(), fill.int()
    return PackedInputs(given, packed._replace(table=table, fill=fill))


def _pools(shape: PackedShape, fill: Tensor, rng: torch.Generator) -> PackedCells:
    """Pages of so many cells each, fill [n]; values and keys have channels of other sizes."""
    dim, size = shape.tail.dim, (len(fill), PACK)
    wide = torch.randn(2, dim, generator=rng).exp_()
    k, v = (torch.randn(*size, dim, generator=rng) * wide[i] + 0.3 for i in range(2))
    k, k_grid = pack_keys(k * 0.5, fill, shape.bits)
    v, v_grid = pack_values(v, fill, shape.bits)
    empty = torch.arange(PACK) >= fill[:, None]
    k_grid[fill == 0] = torch.nan
    v_grid.masked_fill_(empty[:, None, None], torch.nan)
    pos = torch.randint(5 * shape.tail.cells, size, generator=rng).int()
    pos.masked_fill_(empty | torch.tensor(shape.tail.even), 0)
    bias = torch.randn(size, generator=rng).masked_fill_(empty, torch.nan)
    nowhere = torch.empty(0)
    return PackedCells(
        k, k_grid, v, v_grid, pos, bias if shape.tail.bias else None, nowhere, nowhere
    )


def _work(shape: PackedShape, given: PackedInputs) -> tuple[float, float]:
    """Operations and bytes of one layer; those of cells that no query sees count too."""
    flops, nbytes = attention.work(shape.tail, given.tail)
    packed = float(given.packed.fill[0].sum())
    flops += 4.0 * packed * shape.tail.queries * shape.tail.group * shape.tail.dim
    return flops, nbytes + packed / PACK * page_bytes(shape.bits, shape.tail.dim)


def _case(shape: PackedShape, timed: bool = False) -> Case:
    return attention.case_of(shape, inputs, _work, timed)


_TAILS = (
    (Shape(1, 1, 1, 1, 16, 1), 1),
    (Shape(3, 1, 2, 3, 64, 100), 5),
    (Shape(2, 1, 2, 7, 128, 17, BF16, bias=True), 4),
    (Shape(2, 1, 1, 13, 80, 130, bias=True), 3),
    (Shape(2, 5, 2, 2, 96, 40, BF16), 3),
    (Shape(2, 33, 2, 7, 64, 150, bias=True), 4),
    (Shape(1, 1, 2, 4, 256, 300), 40),
    (Shape(1, 90, 1, 1, 112, 200, unaligned=True), 2),
)

_TIMED = tuple(
    PackedShape(Shape(b, q, *model, 64, F32, even=True, layers=layers), bits, (cells - 64) // PACK)
    for model in (attention.SMOLLM2, attention.QWEN2)
    for b, q, cells, layers in attention.SIZES
    for bits in BITS
)

CASES = [
    *(_case(PackedShape(tail, bits, pages)) for tail, pages in _TAILS for bits in BITS),
    *(_case(shape, timed=True) for shape in _TIMED),
]
