"""Linear layers: x @ W^T + b for a few to a few hundred rows.

A row's result must not depend on how many rows run with it, or a request's tokens would depend on
its neighbours. MKL, behind torch's own float32 linear, picks another kernel for other row counts;
oneDNN with a weight packed beforehand gives the same bits from two rows on.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import activations
from engine.kernels.dispatch import Op
from engine.kernels.formats import DenseParts, Parts


class LinearSpec(NamedTuple):
    """What a backend must serve.

    `device` is a torch device's type, `dtype` that of activations, bias and result. `format` is the
    weight's, as `formats.format_of` names it: "float" (the same dtype), "bf16", "int8", "nvfp4".
    `gated`: the first half of the outputs are gates, the second what they gate, and `swiglu` of
    them is the result. `activation_bits`: 0, or 8 or 16: rounded as `activations` says, under int8
    and nvfp4 weights only.
    """

    device: str
    dtype: torch.dtype
    format: str = "float"
    gated: bool = False
    activation_bits: int = 0


class Linear(Protocol):
    """One weight, stored as its backend likes."""

    @property
    def backend(self) -> str:
        """Its name."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], or [T, out / 2] if it is gated."""

    def parts(self) -> Parts:
        """What it was built from, a copy where it's stored otherwise."""


LINEAR: Op[LinearSpec] = Op("linear")
"""`build(spec, parts)` gives a `Linear`; the type of `parts` goes with the spec's format."""


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [T, 2 I] -> [T, I].

    Not by F.silu: its vectorised loop and that loop's scalar tail round exp differently, and which
    element meets the tail depends on the number of rows. torch.exp has no such tail.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.float()
    return (gate / gate.neg().exp_().add_(1)).mul_(up).to(gate_up.dtype)


def _pad_rows(x: Tensor, least: int) -> Tensor:
    missing = least - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing > 0 else x  # F.pad copies even by nothing


@LINEAR.register("reference", refuses=lambda spec: None)
class PlainLinear:
    """torch's own linear on at least 16 rows; other formats become floats anew at every call.

    Not bit for bit the same for every row count: in float32 on CPU it differs at some counts above
    16 too, by rounding (about 1e-6 of the output's scale).
    """

    backend = "reference"

    def __init__(self, spec: LinearSpec, parts: Parts) -> None:
        self._gated = spec.gated
        self._bits = 0 if isinstance(parts, DenseParts) else spec.activation_bits
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._parts.dense(x.dtype)
        if self._bits:
            x = activations.rounded(x.float(), self._bits).to(x.dtype)
        y = F.linear(_pad_rows(x, 16), weight, self._parts.bias)[: x.shape[0]]
        return swiglu(y) if self._gated else y

    def parts(self) -> Parts:
        return self._parts


def _onednn_refuses(spec: LinearSpec) -> str | None:
    if spec.device != "cpu":
        return f"runs on CPU only, not on {spec.device}"
    if spec.format != "float":
        return f"holds weights in the activations' dtype, not as {spec.format}"
    if not torch._C._has_mkldnn:
        return "this torch is built without oneDNN"
    if spec.dtype not in (torch.float32, torch.bfloat16):
        return f"serves float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU lacks AVX-512, which bfloat16 needs"
    return None


@LINEAR.register("onednn", refuses=_onednn_refuses)
class PackedLinear:
    """oneDNN with its own blocked weight layout; the plain tensor isn't kept.

    Rows keep their bits on every shape tried that a model has, with 2 to 16 threads; a bfloat16
    weight of 64 outputs and 11,008 inputs, whose sums are split between threads, did not.
    """

    backend = "onednn"

    def __init__(self, spec: LinearSpec, parts: DenseParts) -> None:
        self._gated = spec.gated
        self.packed = torch.ops.mkldnn._reorder_linear_weight(parts.weight.contiguous(), None)
        self.bias = parts.bias

    def __call__(self, x: Tensor) -> Tensor:
        padded = _pad_rows(x, 2)  # one row alone is a GEMV, which rounds otherwise
        y = torch.ops.mkldnn._linear_pointwise(padded, self.packed, self.bias, "none", [], "")
        y = y[: x.shape[0]]
        return swiglu(y) if self._gated else y

    def parts(self) -> DenseParts:
        return DenseParts(self.packed.to_dense(), self.bias)
