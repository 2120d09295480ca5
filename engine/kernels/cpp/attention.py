"""Native paged attention: float32 queries over float32, bfloat16 or packed cells."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from engine.kernels.attention import ATTENTION, AttentionSpec
from engine.kernels.cpp import library
from engine.kernels.cpp.cells import (
    FORMATS,
    PAGE,
    Cells,
    Packed,
    Rows,
    check,
    point_at_packed,
    point_at_pools,
)
from engine.kernels.packed import BITS, PackedCells

MAX_DIM = 256


def refuses(spec: AttentionSpec) -> str | None:
    if spec.device != "cpu":
        return f"runs on CPU only, not on {spec.device}"
    if spec.dtype != torch.float32:
        return f"takes queries of float32, not {str(spec.dtype).removeprefix('torch.')}"
    if spec.cell_dtype not in FORMATS:
        return (
            f"reads float32 and bfloat16 cells, not {str(spec.cell_dtype).removeprefix('torch.')}"
        )
    if spec.bits and spec.bits not in BITS:
        return f"reads packed cells of 2, 4 and 8 bits, not of {spec.bits}"
    if spec.head_dim % 16 or not 16 <= spec.head_dim <= MAX_DIM:
        return f"head_dim must be a multiple of 16 of at most {MAX_DIM}, not {spec.head_dim}"
    return library.missing()


@ATTENTION.register("cpp", refuses=refuses)
def build(spec: AttentionSpec) -> NativeAttend:
    return NativeAttend(library.context())


class NativeAttend:
    """`attend` on a context; one call at a time.

    A query's result has the same bits whatever the batch, the table's width, the chunk that it is
    read in, and the number of threads.
    """

    def __init__(self, context: library.Context) -> None:
        self._call = context.lib.taut_attend
        pointer = ctypes.c_void_p
        self._call.argtypes = [pointer, pointer, pointer, ctypes.c_int32, pointer, pointer]
        self._context = context.handle
        self._cells, self._rows, self._packed = Cells(), Rows(), Packed()
        self._at = ctypes.addressof(self._cells), ctypes.addressof(self._rows)

    def __call__(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        pos_pool: Tensor,
        table: Tensor,
        lengths: Tensor,
        q_pos: Tensor,
        bias_pool: Tensor | None = None,
        packed: PackedCells | None = None,
    ) -> Tensor:
        """See engine.kernels.attention.attend; cells that aren't held may hold anything."""
        batch, queries, q_heads, dim = q.shape
        _, heads, width = table.shape
        pages = k_pool.shape[0]
        q, table, lengths, q_pos = (t.contiguous() for t in (q, table, lengths, q_pos))
        int32, out = torch.int32, torch.empty_like(q)
        cells, rows = self._cells, self._rows
        point_at_pools(cells, k_pool, v_pool, dim)
        cells.pos = check("pos_pool", pos_pool, int32, pages, PAGE).data_ptr()
        cells.bias = None
        if bias_pool is not None:
            cells.bias = check("bias_pool", bias_pool, torch.float32, pages, PAGE).data_ptr()
        first = _starts(batch, queries).int()
        rows.rows, rows.heads, rows.width = batch, heads, width
        rows.first = first.data_ptr()
        rows.pos = check("q_pos", q_pos, int32, batch, queries).data_ptr()
        rows.table = check("table", table, int32, batch, heads, width).data_ptr()
        rows.table_at = _starts(batch, heads * width).data_ptr()
        rows.length_at = _starts(batch, heads).data_ptr()
        rows.lengths = check("lengths", lengths, int32, batch, heads).data_ptr()
        cells.packed = None
        if packed is not None:
            table, fill = packed.table.contiguous(), packed.fill.contiguous()
            self._point_at_packed(packed._replace(table=table, fill=fill), batch, heads, dim)
        address = check("q", q, torch.float32, batch, queries, q_heads, dim).data_ptr()
        if self._call(self._context, *self._at, q_heads, address, out.data_ptr()):
            raise MemoryError("no memory for attention to work in")
        return out

    def _point_at_packed(self, packed: PackedCells, batch: int, heads: int, dim: int) -> None:
        rows, groups = self._rows, packed.table.shape[2]
        point_at_packed(self._packed, packed, dim)
        self._cells.packed = ctypes.addressof(self._packed)
        shape = batch, heads, groups
        rows.packed = check("packed table", packed.table, torch.int32, *shape).data_ptr()
        rows.fills = check("packed fill", packed.fill, torch.int32, *shape).data_ptr()
        rows.group_at = _starts(batch, heads * groups).data_ptr()
        rows.groups = groups


@lru_cache(maxsize=64)
def _starts(rows: int, each: int) -> Tensor:
    """Where rows of so many elements each begin, and the last one ends: [rows + 1] int64."""
    return torch.arange(rows + 1) * each
