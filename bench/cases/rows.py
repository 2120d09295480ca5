"""Cases of norms, rotation with append, and statistics of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.cases.case import Case, Trial
from engine.kernels.attention import PAGE
from engine.kernels.cpp.library import Context
from engine.kernels.cpp.rows import NativeRows
from engine.kernels.rows import RowStats, rms_norm, rotate_append, row_stats

EPS = 1e-6


def _norm(rows: int, width: int, timed: bool = False) -> Case:
    def make(context: Context) -> Trial:
        rng = torch.Generator().manual_seed(rows + width)
        flat = torch.randn(rows * width + 1, generator=rng)
        x, weight = flat[1:].view(rows, width), torch.randn(width, generator=rng)
        native = NativeRows(context)
        return Trial(
            lambda: [native.rms_norm(x, weight, EPS)],
            lambda: [rms_norm(x, weight, EPS)],
            4.0 * x.numel(),
            2.0 * x.nbytes,
        )

    return Case("rms_norm", f"{rows}x{width}", make, 1e-6, timed)


def _append(
    tokens: int,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    normed: bool,
    timed: bool = False,
) -> Case:
    q_heads, kv_heads = heads

    def make(context: Context) -> Trial:
        rng = torch.Generator().manual_seed(tokens + dim)
        x = torch.randn(tokens, q_heads + 2 * kv_heads, dim, generator=rng)
        if tokens > 1:
            x[1, -1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
            x[0, q_heads, 1] = torch.nan  # a key's stays, and can be seen
        norm = torch.randn(q_heads + kv_heads, dim, generator=rng) if normed else None
        angle = torch.randn(tokens, dim // 2, generator=rng)
        pages = 1 + tokens * kv_heads // PAGE
        cells = torch.randperm(pages * PAGE, generator=rng)[: tokens * kv_heads]
        ends = norm, EPS, angle.cos(), angle.sin()
        at, native = cells.view(tokens, kv_heads), NativeRows(context)

        def pools() -> tuple[Tensor, Tensor]:
            return torch.zeros(pages, PAGE, dim, dtype=dtype), torch.ones(
                pages, PAGE, dim, dtype=dtype
            )

        ours, theirs = pools(), pools()
        return Trial(
            lambda: [native.rotate_append(x, *ends, *ours, at), *ours],
            lambda: [rotate_append(x, *ends, *theirs, at), *theirs],
            6.0 * x.numel(),
            2.0 * x.nbytes,
        )

    name = f"{tokens} {heads} d{dim} {str(dtype).removeprefix('torch.')}{' qk-norm' * normed}"
    # a bfloat16 next to a tie may round to either side
    return Case("rotate_append", name, make, 2e-6 if dtype == torch.float32 else 2.0**-8, timed)


def _stats(rows: int, width: int, kind: str = "", timed: bool = False) -> Case:
    def make(context: Context) -> Trial:
        rng = torch.Generator().manual_seed(rows + width)
        logits = torch.randn(rows, width, generator=rng) * 4
        _spoil(logits, kind)
        native = NativeRows(context)
        return Trial(
            lambda: _columns(native.row_stats(logits)),
            lambda: _columns(row_stats(logits)),
            20.0 * logits.numel(),
            float(logits.nbytes),
        )

    return Case("row_stats", f"{rows}x{width} {kind}".strip(), make, 2e-6, timed)


def _spoil(logits: Tensor, kind: str) -> None:
    rows, width = logits.shape
    if kind == "ties":
        logits[:, width // 2 :: 7] = 50.0
    elif kind == "nan":
        logits[0, width - 1] = torch.nan
        logits[rows // 2, 0] = torch.nan
    elif kind == "banned":
        logits[:, 1:] = -torch.inf
        logits[0] = -torch.inf
    elif kind == "infinite":
        logits[0, width // 3] = torch.inf
    elif kind == "large":
        logits *= 1e4


def _columns(stats: RowStats) -> list[Tensor]:
    return [*stats]


F32, BF16 = torch.float32, torch.bfloat16

CASES = [
    *(_norm(rows, width) for rows, width in ((0, 64), (1, 1), (3, 7), (2, 33), (70, 576))),
    *(_norm(rows, 576, timed=True) for rows in (1, 32, 512)),
    _append(0, (2, 1), 32, F32, False),
    _append(1, (3, 1), 16, F32, True),
    _append(5, (4, 2), 80, BF16, True),
    _append(37, (9, 3), 48, F32, False),
    _append(3, (2, 2), 256, BF16, False),
    *(_append(t, (9, 3), 64, d, False, timed=True) for t in (1, 32, 512) for d in (F32, BF16)),
    _append(32, (16, 8), 128, BF16, True, timed=True),
    _stats(0, 50),
    _stats(1, 1),
    *(_stats(3, 2050, kind) for kind in ("", "ties", "nan", "banned", "infinite", "large")),
    *(_stats(2, 40_000, kind) for kind in ("", "ties", "nan", "banned", "infinite", "large")),
    *(_stats(rows, 49_152, timed=True) for rows in (1, 32)),
    _stats(1, 151_936, timed=True),
]
