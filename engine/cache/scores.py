"""Pure functions that policies score cells with. Letters as in view.py."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def group_logits(queries: Tensor, k: Tensor, pool: Literal["max", "mean"]) -> Tensor:
    """Scaled q.k of each kv head's cells, pooled over the query heads that share it, in float32.

    queries [S, W, Hq, D], k [S, H, N, D] -> [S, H, W, N]
    """
    slots, window, q_heads, dim = queries.shape
    kv_heads = k.shape[1]
    q = queries.float().view(slots, window, kv_heads, q_heads // kv_heads, dim)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [S, H, G * W, D]
    logits = q @ k.float().mT * dim**-0.5  # [S, H, G * W, N]
    logits = logits.unflatten(2, (-1, window))  # [S, H, G, W, N]
    return logits.amax(2) if pool == "max" else logits.mean(2)


def attention(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the cells that each query sees; all zeros for a query that sees none.

    logits [S, H, W, N], seen broadcast to it -> [S, H, W, N]
    """
    masked = logits.masked_fill(~seen, -torch.inf)
    top = masked.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)
    weights = (masked - top).exp()
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)


def mean_over_queries(weights: Tensor, query_pos: Tensor) -> Tensor:
    """Mean over the queries that exist (position >= 0), 0 if there are none: -> [S, H, N]."""
    exists = (query_pos >= 0)[:, None, :, None]
    return (weights * exists).sum(2) / exists.sum(2).clamp(min=1)


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Each cell takes the best score within kernel // 2 cells around it. kernel is odd."""
    return torch.nn.functional.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
