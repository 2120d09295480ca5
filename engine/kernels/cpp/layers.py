"""All decoder layers in one native call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.kernels.cpp import library
from engine.kernels.cpp.attention import MAX_DIM
from engine.kernels.cpp.cells import Cells, Packed, check, point_at_packed, point_at_pools
from engine.kernels.cpp.linear import NativeLinear
from engine.kernels.layers import LAYERS, Layer, LayersShape, LayersSpec, StepCells, StepKV
from engine.kernels.packed import BITS, PackedCells

_int, _long, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class _Shape(ctypes.Structure):
    """taut_shape."""

    _fields_ = (
        ("hidden", _int),
        ("q_heads", _int),
        ("kv_heads", _int),
        ("inner", _int),
        ("eps", ctypes.c_float),
        ("bits", _int),
    )


class _Layer(ctypes.Structure):
    """taut_layer."""

    _fields_ = (
        ("attn_norm", _pointer),
        ("qk_norm", _pointer),
        ("mlp_norm", _pointer),
        ("qkv", _pointer),
        ("out", _pointer),
        ("gate_up", _pointer),
        ("down", _pointer),
    )


class _Step(ctypes.Structure):
    """taut_step."""

    _fields_ = (
        ("cells", Cells),
        ("pos", _pointer),
        ("table", _pointer),
        ("lengths", _pointer),
        ("packed", _pointer),
        ("fills", _pointer),
        ("layers", _int),
        ("width", _long),
        ("groups", _long),
        ("rows", _int),
        ("slots", _pointer),
        ("starts", _pointer),
        ("counts", _pointer),
        ("ring", _pointer),
        ("ring_layer", _long),
        ("ring_at", _pointer),
    )


def refuses(spec: LayersSpec) -> str | None:
    if spec.device != "cpu":
        return f"runs on CPU only, not on {spec.device}"
    if spec.dtype != torch.float32:
        return f"takes activations of float32, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.head_dim % 16 or spec.head_dim > MAX_DIM:
        return f"head_dim must be a multiple of 16 of at most {MAX_DIM}, not {spec.head_dim}"
    if spec.bits and spec.bits not in BITS:
        return f"reads packed cells of 2, 4 and 8 bits, not of {spec.bits}"
    if others := spec.linears - {"cpp"}:
        return f"some matrices are held by {', '.join(sorted(others))}"
    return library.missing()


@LAYERS.register("cpp", refuses=refuses)
class NativeLayers:
    """`Layers` on a context; one call at a time. What it points to is kept in `_held`."""

    def __init__(self, shape: LayersShape, layers: Sequence[Layer], norm: Tensor) -> None:
        context = library.context()
        self._handle = context.handle
        self._call = context.lib.taut_layers
        self._call.argtypes = [_pointer, _pointer, _pointer, _int, _int, *[_pointer] * 5]
        first = _linear(layers[0].gate_up.linear)
        self._shape = _Shape(
            hidden=len(layers[0].attn_norm),
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            inner=first.outs,
            eps=shape.eps,
            bits=first.bits,
        )
        self._dim = shape.head_dim
        self._layers = (_Layer * len(layers))(*map(_native, layers))
        self._step, self._packed = _Step(), Packed()
        self._held = layers, norm
        self._norm = norm.data_ptr()
        self._at = tuple(map(ctypes.addressof, (self._shape, self._layers, self._step)))

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: StepKV) -> Tensor:
        cells = kv.cells()
        self._point_at(cells)
        x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
        shape, layers, step = self._at
        inputs = (cos.data_ptr(), sin.data_ptr(), self._norm, x.data_ptr())
        if self._call(self._handle, shape, layers, 0, len(self._layers), step, *inputs):
            raise MemoryError("no memory for the layers to work in")
        return x

    def _point_at(self, cells: StepCells) -> None:
        step = self._step
        point_at_pools(step.cells, cells.k, cells.v, self._dim)
        step.cells.pos = step.pos = cells.pos.data_ptr()
        step.cells.bias = None if cells.bias is None else cells.bias.data_ptr()
        step.table, step.lengths = _address(cells.table), _address(cells.lengths)
        step.layers, step.width = cells.table.shape[1], cells.table.shape[3]
        step.rows = len(cells.slots)
        step.slots, step.starts = _address(cells.slots), _address(cells.starts)
        step.counts = _address(cells.counts)
        step.cells.packed = None
        if cells.packed is not None:
            self._point_at_packed(cells.packed)
        step.ring = None
        if cells.ring is not None and cells.ring_at is not None:
            step.ring = cells.ring.data_ptr()
            step.ring_layer = cells.ring.stride(0)
            step.ring_at = _address(cells.ring_at)

    def _point_at_packed(self, packed: PackedCells) -> None:
        step = self._step
        point_at_packed(self._packed, packed, self._dim)
        step.cells.packed = ctypes.addressof(self._packed)
        step.packed = check(
            "packed table", packed.table, torch.int32, *packed.table.shape
        ).data_ptr()
        step.fills = check("packed fill", packed.fill, torch.int32, *packed.table.shape).data_ptr()
        step.groups = packed.table.shape[3]


def _address(array: np.ndarray[tuple[int, ...], np.dtype[np.signedinteger]]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _linear(linear: object) -> NativeLinear:
    assert isinstance(linear, NativeLinear)
    return linear


def _native(layer: Layer) -> _Layer:
    def weight(linear: object) -> int:
        return _linear(linear).address

    return _Layer(
        attn_norm=layer.attn_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qkv=weight(layer.qkv.linear),
        out=weight(layer.out.linear),
        gate_up=weight(layer.gate_up.linear),
        down=weight(layer.down.linear),
    )
