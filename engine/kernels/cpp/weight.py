"""Weights in the panels that the native kernels read, and back: `taut_weight` of src/taut.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.cpp.library import Context
from engine.kernels.formats import DenseParts, Int8Parts, Nvfp4Parts, Parts
from engine.kernels.memory import ARENA

PANEL = 16
"""Outputs of a panel, and inputs of a block: both are filled up."""

F32, BF16, INT8, NVFP4 = range(4)
_BLOCK_BYTES = (1024, 512, 256, 128)  # of a panel's values, by format


class _Weight(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("outs", ctypes.c_int32),
        ("ins", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class _Plain(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("values", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
    )


class PackedWeight:
    """One matrix for a call: a weight, or several of the same inputs, one below the other.

    `paired`: two of the same shape, gate and up, whose panels take turns (TAUT_SWIGLU). `address`
    is that of its taut_weight, good as long as this object lives. Where one has a bias, those
    without have zeros.
    """

    def __init__(self, context: Context, parts: Sequence[Parts], *, paired: bool = False) -> None:
        """ValueError: formats or inputs differ, or a pair isn't one."""
        _check(parts, paired)
        self.outs = sum(part.shape[0] for part in parts)
        self.ins = parts[0].shape[1]
        self._context = context
        self._kind = type(parts[0])
        self._format = _format(parts[0])
        self._paired = paired
        self._rows = [part.shape[0] for part in parts]
        self._biased = [part.bias is not None for part in parts]
        widths = [_filled(rows) for rows in self._rows] if paired else [_filled(self.outs)]
        panels, blocks = sum(widths) // PANEL, _filled(self.ins) // PANEL
        self._values = ARENA.zeros(panels * blocks * _BLOCK_BYTES[self._format])
        self._blocks = ARENA.zeros(panels * blocks * PANEL) if self._format == NVFP4 else None
        self._scales = _floats(panels) if self._format in (INT8, NVFP4) else None
        self._bias = _floats(panels) if any(self._biased) else None
        self._struct = _Weight(
            self._format,
            2 * self._rows[0] if paired else self.outs,
            self.ins,
            *(None if t is None else t.data_ptr() for t in self._tensors()),
        )
        self.address = ctypes.addressof(self._struct)
        for index, part in enumerate(parts):
            self._put(index, part)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._tensors() if t is not None)

    def parts(self) -> list[Parts]:
        """What it was made of, copies; floats in the format that they are stored in."""
        return [self._get(index) for index in range(len(self._rows))]

    def _tensors(self) -> tuple[Tensor | None, ...]:
        return self._values, self._blocks, self._scales, self._bias

    def _place(self, index: int) -> tuple[int, int, int]:
        """A part's first output, its first panel, and the step from panel to panel."""
        return (0, index, 2) if self._paired else (sum(self._rows[:index]), 0, 1)

    def _at(self, vector: Tensor, index: int) -> Tensor:
        """The outputs of a part in a vector over all panels: a view [panels, 16] or [rows]."""
        first, panel, step = self._place(index)
        if step == 1:
            return vector[first : first + self._rows[index]]
        return vector.view(-1, PANEL)[panel::step]

    def _put(self, index: int, part: Parts) -> None:
        values, blocks = _plain(part)
        self._move("taut_pack", index, values, blocks)
        if self._scales is not None and not isinstance(part, DenseParts):
            self._write(self._scales, index, part.scales)
        if self._bias is not None and part.bias is not None:
            self._write(self._bias, index, part.bias)

    def _write(self, vector: Tensor, index: int, values: Tensor) -> None:
        at = self._at(vector, index)
        if at.ndim == 2:  # whole panels
            values = torch.nn.functional.pad(values, (0, at.numel() - len(values))).view_as(at)
        at.copy_(values)

    def _read(self, vector: Tensor, index: int) -> Tensor:
        return self._at(vector, index).flatten()[: self._rows[index]].clone()

    def _get(self, index: int) -> Parts:
        rows = self._rows[index]
        bias = None
        if self._bias is not None and self._biased[index]:
            bias = self._read(self._bias, index)
        if self._kind is DenseParts:
            dtype = torch.float32 if self._format == F32 else torch.bfloat16
            values = torch.empty(rows, self.ins, dtype=dtype)
            self._move("taut_unpack", index, values, None)
            return DenseParts(values, bias)
        assert self._scales is not None
        scales = self._read(self._scales, index)
        if self._kind is Int8Parts:
            codes = torch.empty(rows, self.ins, dtype=torch.int8)
            self._move("taut_unpack", index, codes, None)
            return Int8Parts(codes, scales, bias)
        codes = torch.empty(rows, self.ins // 2, dtype=torch.uint8)
        blocks = torch.empty(rows, self.ins // PANEL, dtype=torch.uint8)
        self._move("taut_unpack", index, codes, blocks)
        return Nvfp4Parts(codes, blocks, scales, bias)

    def _move(self, function: str, index: int, values: Tensor, blocks: Tensor | None) -> None:
        plain = _Plain(
            BF16 if values.dtype == torch.bfloat16 else self._format,
            self._rows[index],
            values.data_ptr(),
            None if blocks is None else blocks.data_ptr(),
        )
        first, panel, step = self._place(index)
        getattr(self._context.lib, function)(
            self._context.handle,
            ctypes.byref(self._struct),
            ctypes.byref(plain),
            ctypes.c_int32(first),
            ctypes.c_int32(panel),
            ctypes.c_int32(step),
        )


def halves(parts: Parts) -> list[Parts]:
    """The upper half of the outputs and the lower one: views."""
    half = parts.shape[0] // 2
    return [
        _of_each(lambda tensors: tensors[0][:half], [parts]),
        _of_each(lambda tensors: tensors[0][half:], [parts]),
    ]


def joined(several: Sequence[Parts]) -> Parts:
    """One below the other, in one piece."""
    return several[0] if len(several) == 1 else _of_each(torch.cat, several)


def _of_each(change: Callable[[list[Tensor]], Tensor], several: Sequence[Parts]) -> Parts:
    """`change` of the like tensors of all: each has the outputs first."""
    tensors = [
        None if like[0] is None else change(list(like)) for like in zip(*several, strict=True)
    ]
    made: Parts = type(several[0])._make(tensors)
    return made


def _check(parts: Sequence[Parts], paired: bool) -> None:
    kinds = {_format(part) for part in parts}
    if len(kinds) != 1:
        raise ValueError("parts of one weight must have one number format")
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError(
            f"parts of one weight must have the same inputs, not {[p.shape[1] for p in parts]}"
        )
    if paired and (len(parts) != 2 or parts[0].shape != parts[1].shape):
        raise ValueError(
            f"a pair is a gate and an up of the same shape, not {[p.shape for p in parts]}"
        )
    if any(tensor is not None and tensor.device.type != "cpu" for p in parts for tensor in p):
        raise ValueError("parts must lie on the CPU")


def _format(part: Parts) -> int:
    match part:
        case Int8Parts():
            return INT8
        case Nvfp4Parts():
            return NVFP4
    return BF16 if part.weight.dtype == torch.bfloat16 else F32


def _plain(part: Parts) -> tuple[Tensor, Tensor | None]:
    """The tensors that taut_plain points to, each in one piece."""
    match part:
        case Nvfp4Parts():
            return part.codes.contiguous(), part.blocks.contiguous()
        case Int8Parts():
            return part.codes.contiguous(), None
    dtype = torch.bfloat16 if part.weight.dtype == torch.bfloat16 else torch.float32
    return part.weight.to(dtype).contiguous(), None


def _filled(count: int) -> int:
    return -(-count // PANEL) * PANEL


def _floats(panels: int) -> Tensor:
    return ARENA.zeros(panels * PANEL * 4).view(torch.float32)
