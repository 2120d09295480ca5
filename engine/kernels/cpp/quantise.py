"""Native quantisation to NVFP4, on the caller's thread: a model's matrices load side by side."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpp import library
from engine.kernels.cpp.weight import BF16, F32
from engine.kernels.nvfp4 import (
    BLOCK,
    QUANTISE,
    Quantised,
    ScaleSearch,
    inverse_of,
    tensor_inverse,
)


def _refuses(search: ScaleSearch) -> str | None:
    return library.missing() if search == "max" else f"doesn't search scales by {search}"


@QUANTISE.register("cpp", refuses=_refuses)
class NativeQuantise:
    """The reference's bits."""

    def __init__(self, search: ScaleSearch) -> None:
        found = library.library()
        assert isinstance(found, library.Library), found
        pointer, format, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        real = ctypes.c_float
        self._peaks, self._encode = found.lib.taut_nvfp4_peaks, found.lib.taut_nvfp4_encode
        self._peaks.argtypes = [pointer, format, count, pointer]
        self._encode.argtypes = [pointer, format, count, pointer, real, real, pointer, pointer]
        self._peaks.restype = self._encode.restype = None

    def __call__(self, weight: Tensor) -> Quantised:
        dtype = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
        values = weight.to(dtype).contiguous()
        outs, ins = values.shape
        given = (values.data_ptr(), BF16 if dtype == torch.bfloat16 else F32)
        peaks = torch.empty(outs, ins // BLOCK)
        self._peaks(*given, peaks.numel(), peaks.data_ptr())
        inverse = tensor_inverse(peaks)
        blocks = torch.empty(peaks.shape, dtype=torch.uint8)
        codes = torch.empty(outs, ins // 2, dtype=torch.uint8)
        made = (blocks.data_ptr(), codes.data_ptr())
        scales = (inverse, inverse_of(inverse))
        self._encode(*given, peaks.numel(), peaks.data_ptr(), *scales, *made)
        return Quantised(codes, blocks, inverse)
