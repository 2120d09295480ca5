"""The structures of src/taut.h that say where cells are and whose they are."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.packed import PACK, PackedCells

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
        ("packed", ctypes.c_void_p),
    )


class Packed(ctypes.Structure):
    """taut_packed: the pools of packed pages."""

    _fields_ = (
        ("k", ctypes.c_void_p),
        ("k_grid", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("v_grid", ctypes.c_void_p),
        ("pos", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bits", ctypes.c_int32),
        ("runs", ctypes.c_int32),
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
        ("packed", ctypes.c_void_p),
        ("fills", ctypes.c_void_p),
        ("group_at", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
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


def point_at_packed(packed: Packed, pools: PackedCells, dim: int) -> None:
    """ValueError: the pools aren't what it reads."""
    pages, bits, runs = pools.k.shape[0], pools.bits, pools.v_grid.shape[2]
    codes, half = dim * PACK * bits // 8, torch.float16
    packed.k = check("packed k", pools.k, torch.uint8, pages, codes).data_ptr()
    packed.v = check("packed v", pools.v, torch.uint8, pages, codes).data_ptr()
    packed.k_grid = check("packed k_grid", pools.k_grid, half, pages, 2, dim).data_ptr()
    packed.v_grid = check("packed v_grid", pools.v_grid, half, pages, 2, runs, PACK).data_ptr()
    packed.pos = check("packed pos", pools.pos, torch.int32, pages, PACK).data_ptr()
    packed.bias = None
    if pools.bias is not None:
        packed.bias = check("packed bias", pools.bias, torch.float32, pages, PACK).data_ptr()
    packed.bits, packed.runs = bits, runs
