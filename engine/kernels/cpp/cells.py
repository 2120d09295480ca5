"""The structures of src/taut.h that say where cells are and whose they are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
"""Number formats of cells by dtype: TAUT_F32, TAUT_BF16."""

PAGE = 16


class Cells(ctypes.Structure):
    """taut_cells: the pools."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("format", ctypes.c_int32),
        ("dim", ctypes.c_int32),
    )


class Rows(ctypes.Structure):
    """taut_rows: which cells each of a step's sequences has, and which tokens are its own."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("first", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_at", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("length_at", ctypes.c_void_p),
    )


def check(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    """The tensor, if native code may have its address. ValueError: what it must be instead."""
    if (
        tensor.dtype != dtype
        or tensor.shape != shape
        or not tensor.is_contiguous()
        or not tensor.is_cpu
    ):
        raise ValueError(
            f"{name} must be a contiguous {str(dtype).removeprefix('torch.')} CPU tensor of shape"
            f" {shape}, not {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )
    return tensor


def point_at_pools(cells: Cells, k_pool: Tensor, v_pool: Tensor, dim: int) -> None:
    """Sets all but the positions and the bias. ValueError: the pools aren't what it reads."""
    dtype, pages = k_pool.dtype, k_pool.shape[0]
    if dtype not in FORMATS:
        raise ValueError(f"k_pool must be of float32 or bfloat16, not {dtype}")
    cells.k = check("k_pool", k_pool, dtype, pages, PAGE, dim).data_ptr()
    cells.v = check("v_pool", v_pool, dtype, pages, PAGE, dim).data_ptr()
    cells.format = FORMATS[dtype]
    cells.dim = dim
