"""Cases of the native matrix product: number formats, what becomes of it, shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases.case import Case, Trial
from engine.kernels import activations, int8, nvfp4
from engine.kernels.cpp.library import Context
from engine.kernels.cpp.linear import ADD, STORE, SWIGLU, matmul
from engine.kernels.cpp.weight import PackedWeight
from engine.kernels.formats import DenseParts, Int8Parts, Nvfp4Parts, Parts


class Path(NamedTuple):
    """How a product is computed: the weight's number format, and bits of activations."""

    format: str
    bits: int = 0

    def __str__(self) -> str:
        return f"{self.format}-a{self.bits}" if self.bits else self.format


ROUNDED = tuple(Path(format, bits) for format in ("int8", "nvfp4") for bits in (16, 8))

PATHS = (Path("f32"), Path("bf16"), Path("int8"), Path("nvfp4"), *ROUNDED)

TILES = 2.0**-17
"""Bound where tile registers serve: they see an activation as two bfloat16s, 2^-18 off at most."""

ROWS = (0, 1, 2, 3, 8, 17, 64)


class Product(NamedTuple):
    """Outputs of each part, inputs, and what the product is for. `loose`: rows of x and y have
    others' memory between them."""

    path: Path
    outs: tuple[int, ...]
    ins: int
    then: int = STORE
    bias: bool = False
    loose: bool = False

    @property
    def width(self) -> int:
        """Of y."""
        return self.outs[0] if self.then == SWIGLU else sum(self.outs)

    def name(self) -> str:
        then = ("", "-add", "-swiglu")[self.then]
        shape = f"{'+'.join(map(str, self.outs))}x{self.ins}"
        return f"{self.path}{then}-{shape}{'-bias' * self.bias}{'-loose' * self.loose}"


@cache
def parts_of(product: Product) -> tuple[Parts, ...]:
    """Random weights in the format, the scale of a layer's."""
    rng = torch.Generator().manual_seed(product.ins + sum(product.outs))
    return tuple(_part(product, outs, rng) for outs in product.outs)


def _part(product: Product, outs: int, rng: torch.Generator) -> Parts:
    weight = torch.randn(outs, product.ins, generator=rng) * product.ins**-0.5
    bias = torch.randn(outs, generator=rng) if product.bias else None
    match product.path.format:
        case "int8":
            return Int8Parts(*int8.quantise(weight), bias)
        case "nvfp4":
            codes, blocks, inverse = nvfp4.quantise(weight)
            return Nvfp4Parts(codes, blocks, torch.full((outs,), 1 / inverse), bias)
    dtype = torch.float32 if product.path.format == "f32" else torch.bfloat16
    return DenseParts(weight.to(dtype), bias)


def packed(product: Product, context: Context) -> PackedWeight:
    return PackedWeight(context, parts_of(product), paired=product.then == SWIGLU)


def inputs(product: Product, rows: int) -> tuple[Tensor, Tensor]:
    """x, and y as it is before: both poisoned where nothing may be read or must be left."""
    rng = torch.Generator().manual_seed(rows)
    gap = 3 if product.loose else 0
    x = torch.full((rows, product.ins + gap), torch.nan)
    x[:, : product.ins] = torch.randn(rows, product.ins, generator=rng)
    y = torch.full((rows, product.width + gap), torch.nan)
    if product.then == ADD:
        y[:, : product.width] = torch.randn(rows, product.width, generator=rng)
    return x, y


def expected(product: Product, x: Tensor, y: Tensor) -> Tensor:
    """All of y afterwards, in float64."""
    x, y = x[:, : product.ins], y.double()
    if product.path.bits:
        x = activations.rounded(x, product.path.bits)
    outs = [
        x.double() @ part.dense(torch.float32).double().T
        + (0 if part.bias is None else part.bias.double())
        for part in parts_of(product)
    ]
    own = y[:, : product.width]
    if product.then == SWIGLU:
        own[:] = F.silu(outs[0]) * outs[1]
    elif product.then == ADD:
        own += torch.cat(outs, 1)
    else:
        own[:] = torch.cat(outs, 1)
    return y


def _trial(product: Product, rows: Sequence[int], context: Context) -> Trial:
    weight = packed(product, context)
    given = [inputs(product, count) for count in rows]

    def run() -> list[Tensor]:
        outs = []
        for x, y in given:
            out = y.clone()
            matmul(context, weight, x, out, product.then, product.path.bits)
            outs.append(out)
        return outs

    def wanted() -> list[Tensor]:
        return [expected(product, x, y) for x, y in given]

    work = 2.0 * sum(rows) * sum(product.outs) * product.ins
    return Trial(run, wanted, work, float(weight.nbytes * len(rows)))


def _case(product: Product, rows: Sequence[int], timed: bool = False) -> Case:
    name = f"{product.name()}-m{rows[0]}" if timed else product.name()
    tiles = None if product.path in (Path("f32"), *ROUNDED) else TILES
    return Case("linear", name, partial(_trial, product, rows), 2e-6, timed, tiles)


def _odd(path: Path) -> list[Product]:
    def ins(count: int) -> int:
        return -(-count // 16) * 16 if path.format == "nvfp4" else count

    return [
        Product(path, (1,), ins(1)),
        Product(path, (33,), ins(50), bias=True, loose=True),
        Product(path, (20, 9, 7), ins(97), ADD, loose=True),
        Product(path, (130,), ins(1037), bias=True),
        Product(path, (40, 40), ins(64), SWIGLU, bias=True, loose=True),
        Product(path, (80, 80), ins(291), SWIGLU),
    ]


SMALL = [product for path in PATHS for product in _odd(path)]

# SmolLM2-135M's, then Qwen2.5-0.5B's
_LAYERS = (
    ((576, 192, 192), 576, STORE),
    ((1536, 1536), 576, SWIGLU),
    ((576,), 1536, ADD),
    ((4864, 4864), 896, SWIGLU),
    ((896,), 4864, ADD),
)

CASES = [
    *(_case(product, ROWS) for product in SMALL),
    *(
        _case(Product(path, outs, ins, then), (rows,), timed=True)
        for path in PATHS
        for outs, ins, then in _LAYERS
        for rows in (1, 8, 32, 64, 512)
    ),
]
