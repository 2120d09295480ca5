"""The native matrix product: every case on every instruction set; rows in other company."""

import pytest
import torch
from torch import Tensor

from bench.cases.case import Case, error
from bench.cases.linear import CASES, PATHS, SMALL, Path, Product, inputs, packed, parts_of
from engine.kernels.activations import round_rows
from engine.kernels.cpp import library
from engine.kernels.cpp.library import Context
from engine.kernels.cpp.linear import SWIGLU, NativeLinear, matmul
from engine.kernels.cpp.weight import PackedWeight
from engine.kernels.dispatch import select
from engine.kernels.formats import DenseParts, Parts
from engine.kernels.linear import LINEAR, LinearSpec

SETS = library.available()
pytestmark = pytest.mark.skipif(not SETS, reason="the native library isn't built")

by_set = pytest.mark.parametrize("set", SETS)
by_threads = pytest.mark.parametrize("threads", [1, 2])
by_path = pytest.mark.parametrize("path", PATHS, ids=str)


@by_threads
@by_set
@pytest.mark.parametrize("case", [c for c in CASES if not c.timed], ids=lambda case: case.name)
def test_equals_its_reference(case: Case, set: str, threads: int) -> None:
    trial = case.make(library.opened(threads, set))
    assert error(trial.run(), trial.expected()) <= case.bound_on(set)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.timed and "-m8" in c.name], ids=lambda case: case.name
)
def test_equals_its_reference_at_a_models_size(case: Case) -> None:
    if "4864" in case.name:
        pytest.skip("of a size with others, and slow")
    trial = case.make(library.opened(1, SETS[-1]))
    assert error(trial.run(), trial.expected()) <= case.bound_on(SETS[-1])


def product_of(context: Context, product: Product, x: Tensor) -> Tensor:
    y = torch.zeros(len(x), product.width)
    matmul(context, packed(product, context), x, y, product.then, product.path.bits)
    return y


@by_set
@by_path
def test_a_row_has_the_same_bits_in_any_company(path: Path, set: str) -> None:
    product = Product(path, (72, 72), 1072, SWIGLU)
    one, two = library.opened(1, set), library.opened(2, set)
    x, _ = inputs(product, 67)
    whole = product_of(two, product, x)
    for rows in (1, 2, 3, 4, 5, 8, 12, 13, 16, 17, 33, 64):
        assert torch.equal(product_of(one, product, x[:rows]), whole[:rows])
        assert torch.equal(product_of(two, product, x[-rows:]), whole[-rows:])


@by_set
def test_a_row_has_the_same_bits_in_a_long_prompt(set: str) -> None:
    """More rows than go in one pass."""
    product = Product(Path("bf16"), (16,), 32)
    context = library.opened(2, set)
    x, _ = inputs(product, 700)
    whole = product_of(context, product, x)
    for row in (0, 191, 192, 383, 384, 699):
        assert torch.equal(product_of(context, product, x[row : row + 1])[0], whole[row])


def same(one: Parts, other: Parts) -> bool:
    return type(one) is type(other) and all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(one, other, strict=True)
    )


@by_threads
@pytest.mark.parametrize("product", SMALL, ids=Product.name)
def test_parts_come_back_bit_for_bit(product: Product, threads: int) -> None:
    weight = packed(product, library.opened(threads, SETS[-1]))
    for got, want in zip(weight.parts(), parts_of(product), strict=True):
        assert same(got, want)


def test_floats_of_the_other_width_are_converted() -> None:
    context = library.opened(1, SETS[-1])
    weight = torch.randn(18, 35)
    weight[0, :4] = torch.tensor([torch.nan, -torch.inf, 3.4e38, 1e-40])
    for dtype in (torch.float32, torch.bfloat16):
        part = DenseParts(weight.to(dtype), None)
        [back] = PackedWeight(context, [part]).parts()
        assert torch.equal(back[0].nan_to_num(7.0), part.weight.nan_to_num(7.0))


@by_set
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("path", [p for p in PATHS if p.bits], ids=str)
def test_a_row_that_cannot_be_rounded_is_nan_and_no_other_is(
    path: Path, poison: float, set: str
) -> None:
    product = Product(path, (40,), 96)
    context = library.opened(1, set)
    x, _ = inputs(product, 5)
    clean = product_of(context, product, x)
    x[2, 50] = poison
    y = product_of(context, product, x)
    assert y[2].isnan().all()
    others = torch.arange(5) != 2
    assert torch.equal(y[others], clean[others])


@by_set
@by_path
def test_small_and_large_activations(path: Path, set: str) -> None:
    """Zeros stay zeros; blocks of very different size don't disturb each other."""
    product = Product(path, (16,), 64)
    context = library.opened(1, set)
    x, _ = inputs(product, 3)
    x[0] = 0
    x[1, :16] *= 1e-35
    x[2, :16] *= 1e30
    y = product_of(context, product, x)
    assert not y[0].any()
    x[1, :16] = 0
    torch.testing.assert_close(product_of(context, product, x)[1], y[1], rtol=0, atol=1e-30)
    assert y[2].isfinite().all()


def test_rounding_is_to_the_nearest_ties_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.4, -127.0]])
    whole, scales = round_rows(x, 8)
    assert whole[0, 0, :7].tolist() == [127, 0, 2, 0, -2, 126, -127]
    assert scales.tolist() == [[1.0]]
    assert round_rows(x, 16)[0].abs().max() == 127 * 256


def test_the_backend_serves_and_refuses() -> None:
    spec = LinearSpec("cpu", torch.bfloat16)
    build = select(LINEAR, spec, ("cpp",)).build
    weight = torch.randn(24, 40).bfloat16()
    linear = build(spec, DenseParts(weight, None))
    assert isinstance(linear, NativeLinear)
    x = torch.randn(3, 40).bfloat16()
    y = linear(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), x.float() @ weight.float().T, rtol=1e-2, atol=1e-2)
    reasons = dict(LINEAR.reasons(LinearSpec("cuda", torch.float32)))
    assert "not on cuda" in str(reasons["cpp"])


@pytest.mark.parametrize("path", [p for p in PATHS if p.format != "f32"], ids=str)
def test_a_gated_linear_is_its_reference(path: Path) -> None:
    product = Product(path, (80,), 96, bias=True)
    [parts] = parts_of(product)
    spec = LinearSpec("cpu", torch.float32, path.format, gated=True, activation_bits=path.bits)
    linear = select(LINEAR, spec, ("cpp",)).build(spec, parts)
    reference = select(LINEAR, spec, ("reference",)).build(spec, parts)
    x, _ = inputs(product, 9)
    assert linear(x).shape == (9, 40)
    assert error([linear(x)], [reference(x)]) <= 2e-6
    assert same(linear.parts(), parts)


def test_parts_that_make_no_weight_are_refused() -> None:
    context = library.opened(1, SETS[-1])
    one, other = (DenseParts(torch.zeros(4, ins), None) for ins in (8, 9))
    with pytest.raises(ValueError, match="same inputs"):
        PackedWeight(context, [one, other])
    with pytest.raises(ValueError, match="one number format"):
        PackedWeight(context, [one, DenseParts(one.weight.bfloat16(), None)])
    with pytest.raises(ValueError, match="a gate and an up"):
        PackedWeight(context, [one], paired=True)
