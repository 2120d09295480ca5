"""Pure functions that policies score cells with. Letters as in view.py; G query heads a kv head."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache.view import LayerView

GROUPS = ("max", "mean", "softmax")
"""How a kv head's query heads become one: see `window_attention`."""

Group = Literal["max", "mean", "softmax"]

_ROWS = 256
"""Rows of the keys' similarity matrix held at a time."""


def head_logits(queries: Tensor, k: Tensor) -> Tensor:
    """Scaled q.k of each query head with its kv head's cells, in float32.

    queries [S, W, Hq, D], k [S, H, N, D] -> [S, H, G, W, N]
    """
    slots, window, q_heads, dim = queries.shape
    kv_heads = k.shape[1]
    q = queries.float().view(slots, window, kv_heads, q_heads // kv_heads, dim)
    q = q.permute(0, 2, 3, 1, 4).flatten(2, 3) * dim**-0.5  # [S, H, G * W, D]
    return (q @ k.float().mT).unflatten(2, (-1, window))


def attention(logits: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the cells that each query sees; all zeros for a query that sees none.

    logits [..., N], overwritten; seen broadcast to it -> [..., N]
    """
    logits.masked_fill_(~seen, torch.finfo(logits.dtype).min)
    return logits.softmax(-1).mul_(seen.any(-1, keepdim=True))


def window_attention(
    view: LayerView, candidates: Tensor, group: Group, causal: bool = True
) -> Tensor:
    """What the remembered queries attend to among the candidates [S, H, N] (that came before them,
    if causal), on average over the queries that exist: [S, H, N].

    The query heads of a kv head count as one: the softmax of the largest ("max") or the mean logit
    of the group, or the mean of the heads' own softmaxes ("softmax").
    """
    assert view.queries is not None
    assert view.query_pos is not None
    seen = candidates[:, :, None]  # [S, H, 1, N]
    if causal:
        seen = seen & (view.pos[:, :, None] <= view.query_pos[:, None, :, None])  # [S, H, W, N]
    exists = (view.query_pos >= 0).float()
    share = exists / exists.sum(-1, keepdim=True).clamp(min=1)  # [S, W]
    share = share[:, None] * seen.any(-1)  # [S, H, W]
    logits = head_logits(view.queries, view.k)  # [S, H, G, W, N]
    if group == "softmax":
        count = logits.shape[2]
        share, seen = share.repeat(1, 1, count) / count, seen.unsqueeze(2)
    else:
        logits = logits.amax(2) if group == "max" else logits.mean(2)
    logits.masked_fill_(~seen, torch.finfo(logits.dtype).min)
    weights = logits.softmax(-1).view(*share.shape, -1)  # [S, H, (G) W, N]
    return (share[:, :, None] @ weights)[:, :, 0]


def older(view: LayerView, recent: Tensor | int) -> Tensor:
    """All valid cells of each head but its last `recent` ([S, H] or one for all): [S, H, N]."""
    index = torch.arange(view.valid.shape[-1], device=view.valid.device)
    return index < (view.valid.sum(-1) - recent)[..., None]


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """Each cell takes the best score within kernel // 2 cells around it. kernel is odd."""
    return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)


def mean_pool(scores: Tensor, kernel: int) -> Tensor:
    """Each cell takes the mean within kernel // 2 cells around it; beyond the ends are zeros."""
    return F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)


def redundancy(k: Tensor, valid: Tensor, threshold: float | None) -> Tensor:
    """How alike each key is to the others of its head: their mean cosine, softmaxed over cells.

    With a threshold each key stops counting against the newest key that is more alike than that,
    so that of several alike the newest stays; a key that is like no other spares the first cell
    (as R-KV's code does). k [S, H, N, D], valid [S, H, N] -> [S, H, N], 0 where not valid.
    """
    keys = F.normalize(k.float(), dim=-1) * valid[..., None]
    cells = keys.shape[2]
    index = torch.arange(cells, device=k.device)
    small = index.to(torch.int16 if cells < 2**15 else torch.int32)
    total = torch.zeros_like(keys[..., 0])
    for start in range(0, cells, _ROWS):
        alike = keys[:, :, start : start + _ROWS] @ keys.mT  # [S, H, R, N]
        alike.diagonal(start, -2, -1).zero_()
        if threshold is not None:
            newest = torch.where(alike > threshold, small, 0).amax(-1, keepdim=True)
            alike.scatter_(-1, newest.long(), 0.0)
        total += alike.sum(2)
    return attention(total / valid.sum(-1, keepdim=True).clamp(min=1), valid)
