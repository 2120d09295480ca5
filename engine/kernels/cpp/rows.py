"""Native norms, rotation with append, and statistics of logits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.kernels.cpp.cells import Cells, check, point_at_pools
from engine.kernels.cpp.library import Context
from engine.kernels.rows import RowStats


class NativeRows:
    """The functions of engine.kernels.rows on a context; one call at a time.

    Tensors are float32, contiguous and on the CPU (ValueError otherwise).
    """

    def __init__(self, context: Context) -> None:
        pointer, count, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float
        lib = context.lib
        self._norm, self._append = lib.taut_rms_norm, lib.taut_rotate_append
        self._stats = lib.taut_row_stats
        self._norm.argtypes = [pointer, pointer, count, count, pointer, real, pointer]
        self._append.argtypes = [pointer, pointer, *(count,) * 3, pointer, real, *(pointer,) * 5]
        self._stats.argtypes = [pointer, pointer, count, count, *(pointer,) * 4]
        self._norm.restype = self._append.restype = None
        self._context = context.handle
        self._cells = Cells()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [R, W], weight [W]."""
        rows, width = x.shape
        y = torch.empty_like(x)
        self._norm(
            self._context,
            check("x", x, torch.float32, rows, width).data_ptr(),
            rows,
            width,
            check("weight", weight, torch.float32, width).data_ptr(),
            eps,
            y.data_ptr(),
        )
        return y

    def rotate_append(
        self,
        heads: Tensor,
        qk_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        cells: Tensor,
    ) -> Tensor:
        """heads [T, Hq + 2 H, D] -> q [T, Hq, D]; D a multiple of 16, at most 256."""
        tokens, all_heads, dim = heads.shape
        kv_heads = cells.shape[1]
        q_heads = all_heads - 2 * kv_heads
        if dim % 16 or dim > 256:
            raise ValueError(f"head_dim must be a multiple of 16 of at most 256, not {dim}")
        point_at_pools(self._cells, k_pool, v_pool, dim)
        norm = None
        if qk_norm is not None:
            norm = check("qk_norm", qk_norm, torch.float32, q_heads + kv_heads, dim).data_ptr()
        q = torch.empty(tokens, q_heads, dim)
        self._append(
            self._context,
            check("heads", heads, torch.float32, tokens, all_heads, dim).data_ptr(),
            tokens,
            q_heads,
            kv_heads,
            norm,
            eps,
            check("cos", cos, torch.float32, tokens, dim // 2).data_ptr(),
            check("sin", sin, torch.float32, tokens, dim // 2).data_ptr(),
            q.data_ptr(),
            ctypes.addressof(self._cells),
            check("cells", cells, torch.int64, tokens, kv_heads).data_ptr(),
        )
        return q

    def row_stats(self, logits: Tensor) -> RowStats:
        """logits [R, V]."""
        rows, width = logits.shape
        address = check("logits", logits, torch.float32, rows, width).data_ptr()
        best = torch.empty(rows, dtype=torch.int64)
        floats = torch.empty(3, rows)
        out = [best.data_ptr(), *(floats.data_ptr() + 4 * rows * i for i in range(3))]
        if self._stats(self._context, address, rows, width, *out):
            raise MemoryError("no memory for the statistics of logits to work in")
        return RowStats(best, *floats)
