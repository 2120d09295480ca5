"""The native linear: any number format, activations in float32 or rounded to integers."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from engine.kernels.cpp import library
from engine.kernels.cpp.weight import PackedWeight, halves, joined
from engine.kernels.formats import Parts
from engine.kernels.linear import LINEAR, LinearSpec

STORE, ADD, SWIGLU = range(3)
"""What becomes of a product: y = it; y += it; y = silu(gate) * up, of a paired weight."""

_NO_MEMORY = "no memory to multiply matrices in"


def _refuses(spec: LinearSpec) -> str | None:
    if spec.device != "cpu":
        return f"runs on CPU only, not on {spec.device}"
    if spec.dtype not in (torch.float32, torch.bfloat16):
        return f"serves float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    return library.missing()


@LINEAR.register("cpp", refuses=_refuses)
class NativeLinear:
    """A weight in panels. A row has the same bits however many rows run with it.

    `outs` is the width of a result, `bits` and `address` are what calls of several matrices take.
    """

    backend = "cpp"

    def __init__(
        self, spec: LinearSpec, parts: Parts, context: library.Context | None = None
    ) -> None:
        loading = context or library.context()
        given = halves(parts) if spec.gated else [parts]
        self.weight = PackedWeight(loading, given, paired=spec.gated)
        self.address = self.weight.address
        self.outs = given[0].shape[0]
        self.bits = spec.activation_bits
        self._then = SWIGLU if spec.gated else STORE
        self._matmul = _matmul(loading.lib)
        self._context = context

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self(x.float()).to(x.dtype)
        if self._context is None:  # that of its first caller: a loading thread's has one thread
            self._context = library.context()
        rows, ins = x.shape
        outs = self.outs
        x = x.contiguous()
        y = torch.empty(rows, outs)
        where = (x.data_ptr(), ins, rows, y.data_ptr(), outs)
        if self._matmul(self._context.handle, self.address, *where, self._then, self.bits):
            raise MemoryError(_NO_MEMORY)
        return y

    def parts(self) -> Parts:
        return joined(self.weight.parts())


def matmul(
    context: library.Context,
    weight: PackedWeight,
    x: Tensor,
    y: Tensor,
    then: int = STORE,
    bits: int = 0,
) -> None:
    """x [T, in] -> y [T, out], or [T, out / 2] for SWIGLU: float32 on CPU, each row in one piece.

    `bits` of activations: 0 as they are, 8 or 16 rounded (int8 and nvfp4 weights; others ignore
    it). MemoryError: none to work in.
    """
    if x.stride(1) != 1:
        x = x.contiguous()
    status = _matmul(context.lib)(
        context.handle,
        weight.address,
        x.data_ptr(),
        x.stride(0),
        x.shape[0],
        y.data_ptr(),
        y.stride(0),
        then,
        bits,
    )
    if status:
        raise MemoryError(_NO_MEMORY)


@cache
def _matmul(lib: ctypes.CDLL) -> ctypes._NamedFuncPointer:
    function = lib.taut_matmul
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, i64, i32, pointer, i64, i32, i32]
    return function
