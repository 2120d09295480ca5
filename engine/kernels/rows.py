"""Norms, rotation and statistics row by row: the plain definitions of what native code fuses.

Each row's result depends on that row alone. A decoder layer is their composition with LINEAR and
ATTENTION; everything is computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RowStats(NamedTuple):
    """Of each row of logits, [R] each."""

    best: Tensor  # int64: the greatest entry, the first of equals; -1 if there is a NaN
    greatest: Tensor  # float32, its value
    logsumexp: Tensor  # float32
    entropy: Tensor  # float32, nats, of the softmax


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] over its root mean square, times weight [W] (or a weight for each row)."""
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def rotate_append(
    heads: Tensor,
    qk_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cells: Tensor,
) -> Tensor:
    """Norms and turns a projection's heads [T, Hq + 2 H, D], q, k and v; gives q [T, Hq, D].

    Keys and values go to `cells` [T, H] (int64, page * 16 + offset) of the pools [pages, 16, D],
    rounded to their dtype; a value that isn't finite is stored as 0. qk_norm [Hq + H, D] has a
    weight for each head; cos and sin are [T, D / 2], for the pairs of dimensions i and i + D / 2.
    """
    kv_heads, dim = cells.shape[1], heads.shape[2]
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    a, b = qk.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    qk = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    at = cells.flatten()
    v = v.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    k_pool.view(-1, dim)[at] = qk[:, -kv_heads:].reshape(-1, dim).to(k_pool.dtype)
    v_pool.view(-1, dim)[at] = v.reshape(-1, dim).to(v_pool.dtype)
    return qk[:, :-kv_heads].contiguous()


def row_stats(logits: Tensor) -> RowStats:
    """Of each row of float32 logits [R, V]; entries may be minus infinity."""
    best = logits.argmax(-1).masked_fill(logits.isnan().any(-1), -1)
    exact = logits.double()
    entropy = torch.special.entr(exact.softmax(-1)).sum(-1)
    return RowStats(best, logits.amax(-1), exact.logsumexp(-1).float(), entropy.float())
