"""Paged attention: queries against cells scattered over pages, ragged from head to head.

The cells of a sequence are read in fixed splits counted from cell 0, joined by an online softmax
in that order (FlashDecoding, Dao et al. 2023). What lies beyond a head's length changes no bit, so
a sequence's output doesn't depend on how far its neighbours' tables reach.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.dispatch import Op

PAGE = 16
"""Cells of one page."""

SPLIT = 128
"""Cells that one pass of the reference reads: whole pages."""

MIN_ROWS = 8
"""A float32 bmm's bits depend on its row count below this many rows, and not from there on."""


class AttentionSpec(NamedTuple):
    """What a backend must serve; `device` is a torch device's type, `group` the GQA group, `bias`
    whether cells carry one (it's passed as `bias_pool` then)."""

    head_dim: int
    group: int
    device: str
    dtype: torch.dtype
    cell_dtype: torch.dtype
    bias: bool = False


class Attend(Protocol):
    """`attend` below, or a backend's; an op's build takes the spec and gives one."""

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
    ) -> Tensor: ...


ATTENTION: Op[AttentionSpec] = Op("attention")


@ATTENTION.register("reference", refuses=lambda spec: None)
def reference(spec: AttentionSpec) -> Attend:
    return attend


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    pos_pool: Tensor,
    table: Tensor,
    lengths: Tensor,
    q_pos: Tensor,
    bias_pool: Tensor | None = None,
) -> Tensor:
    """Softmax attention with scale 1 / sqrt(D), computed in float32 whatever the dtypes.

    | q, result      | [B, M, Hq, D] | query heads of one kv head are neighbours           |
    | k_pool, v_pool | [pages, 16, D]| a page is 16 cells of one kv head of one layer      |
    | pos_pool       | [pages, 16]   | the position that each cell's token had             |
    | table          | [B, H, P]     | page ids; past a head's length they may be any page |
    | lengths        | [B, H]        | cells that each head holds                          |
    | q_pos          | [B, M]        | the queries' positions                              |
    | bias_pool      | [pages, 16]   | float32, what is added to each cell's logits        |

    Integers are int32. A query sees cell c of its kv head iff c < length and the cell's position is
    at most its own; one that sees nothing (padding) gets zeros. All of v_pool must be finite.
    """
    dtype = q.dtype
    batch, queries, q_heads, dim = q.shape
    heads = table.shape[1]
    group = q_heads // heads
    rows = queries * group
    if missing := -table.shape[2] % (SPLIT // PAGE):
        table = F.pad(table, (0, missing))  # [B, H, P]
    pos = _cell_positions(pos_pool, table, lengths)  # [B, H, P * 16]

    q = q.float() * dim**-0.5
    q = q.view(batch, queries, heads, group, dim).transpose(1, 2)  # [B, H, M, G, D]
    q = F.pad(q.reshape(-1, rows, dim), (0, 0, 0, max(MIN_ROWS - rows, 0)))  # [B * H, R, D]
    peak = q.new_full((*q.shape[:2], 1), -1e30)  # finite: a split that shows nothing leaves it be
    total = torch.zeros_like(peak)
    out = torch.zeros_like(q)
    for start in range(0, pos.shape[2], SPLIT):
        pages = table[:, :, start // PAGE : (start + SPLIT) // PAGE].reshape(-1)
        unseen = pos[:, :, None, start : start + SPLIT] > q_pos[:, None, :, None]  # [B, H, M, S]
        scores = torch.bmm(q, _cells(k_pool, pages).transpose(1, 2))  # [B * H, R, S]
        shown = scores[:, :rows].view(batch, heads, queries, group, SPLIT)
        if bias_pool is not None:
            shown.add_(bias_pool.index_select(0, pages).view(batch, heads, 1, 1, SPLIT))
        shown.masked_fill_(unseen[:, :, :, None], -torch.inf)
        before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        decay = before.sub_(peak).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        out.mul_(decay).add_(torch.bmm(weights, _cells(v_pool, pages)))
    out.div_(total.clamp_min_(1e-30))
    out = out[:, :rows].view(batch, heads, queries, group, dim).transpose(1, 2)
    return out.reshape(batch, queries, q_heads, dim).to(dtype)


def _cell_positions(pos_pool: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Every cell's position, [B, H, P * 16]; of cells that a head doesn't hold, past any query."""
    pos = pos_pool.index_select(0, table.flatten()).view(*table.shape[:2], -1)
    cell = torch.arange(pos.shape[2], device=pos.device)
    return pos.masked_fill_(cell >= lengths[..., None], torch.iinfo(pos.dtype).max)


def _cells(pool: Tensor, pages: Tensor) -> Tensor:
    """The cells of whole splits, float32: [B * H, S, D]."""
    return pool.index_select(0, pages).view(-1, SPLIT, pool.shape[2]).float()
