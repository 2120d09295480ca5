"""Paged attention: queries against cells scattered over pages, ragged from head to head.

The cells of a sequence are read in fixed splits counted from cell 0, joined by an online softmax
in that order (FlashDecoding, Dao et al. 2023): packed pages first, where there are any, each a
split. What lies beyond a head's length changes no bit, so a sequence's output doesn't depend on how
far its neighbours' tables reach.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.dispatch import Op
from engine.kernels.packed import PACK, PackedCells, unpack_keys, unpack_values

PAGE = 16
"""Cells of one page."""

SPLIT = 128
"""Cells that one pass of the reference reads: whole pages."""

MIN_ROWS = 8
"""A float32 bmm's bits depend on its row count below this many rows, and not from there on."""


class AttentionSpec(NamedTuple):
    """What a backend must serve; `device` is a torch device's type, `group` the GQA group, `bias`
    whether cells carry one (it's passed as `bias_pool` then), `bits` those of packed cells, 0 where
    `packed` is never passed."""

    head_dim: int
    group: int
    device: str
    dtype: torch.dtype
    cell_dtype: torch.dtype
    bias: bool = False
    bits: int = 0


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
        packed: PackedCells | None = None,
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
    packed: PackedCells | None = None,
) -> Tensor:
    """Softmax attention with scale 1 / sqrt(D), computed in float32 whatever the dtypes.

    | q, result      | [B, M, Hq, D] | query heads of one kv head are neighbours           |
    | k_pool, v_pool | [pages, 16, D]| a page is 16 cells of one kv head of one layer      |
    | pos_pool       | [pages, 16]   | the position that each cell's token had             |
    | table          | [B, H, P]     | page ids; past a head's length they may be any page |
    | lengths        | [B, H]        | cells that each head holds                          |
    | q_pos          | [B, M]        | the queries' positions                              |
    | bias_pool      | [pages, 16]   | float32, what is added to each cell's logits        |
    | packed         |               | cells in packed pages, which stand before the others|

    Integers are int32. A query sees cell c of its kv head iff c < length and the cell's position is
    at most its own; one that sees nothing (padding) gets zeros. All of v_pool must be finite.
    """
    softmax = _Softmax(q, q_pos, table.shape[1])
    if packed is not None:
        for group in range(packed.table.shape[2]):
            softmax.add(*_packed_split(packed, group))
    if missing := -table.shape[2] % (SPLIT // PAGE):
        table = F.pad(table, (0, missing))  # [B, H, P]
    pos = pos_pool.index_select(0, table.flatten()).view(*table.shape[:2], -1)  # [B, H, P * 16]
    pos = _held(pos, lengths[..., None])
    for start in range(0, pos.shape[2], SPLIT):
        pages = table[:, :, start // PAGE : (start + SPLIT) // PAGE].reshape(-1)
        bias = None if bias_pool is None else bias_pool.index_select(0, pages)
        k, v = (_cells(pool, pages) for pool in (k_pool, v_pool))
        softmax.add(k, v, pos[:, :, start : start + SPLIT], bias)
    return softmax.result()


class _Softmax:
    """An online softmax over splits of cells."""

    def __init__(self, q: Tensor, q_pos: Tensor, heads: int) -> None:
        batch, queries, q_heads, dim = q.shape
        self._shape = batch, heads, queries, q_heads // heads
        self._dtype, self._q_pos = q.dtype, q_pos
        self._rows = rows = queries * q_heads // heads
        q = (q.float() * dim**-0.5).view(batch, queries, heads, -1, dim)
        q = q.transpose(1, 2).reshape(-1, rows, dim)  # [B * H, M * G, D]
        self._q = q = F.pad(q, (0, 0, 0, max(MIN_ROWS - rows, 0)))  # [B * H, R, D]
        # finite: a split that shows nothing leaves it be
        self._peak = q.new_full((*q.shape[:2], 1), -1e30)
        self._total = torch.zeros_like(self._peak)
        self._out = torch.zeros_like(q)

    def add(self, k: Tensor, v: Tensor, pos: Tensor, bias: Tensor | None) -> None:
        """k and v [B * H, S, D] float32 at pos [B, H, S]; bias of so many numbers."""
        batch, heads, queries, group = self._shape
        unseen = pos[:, :, None] > self._q_pos[:, None, :, None]  # [B, H, M, S]
        scores = torch.bmm(self._q, k.transpose(1, 2))  # [B * H, R, S]
        shown = scores[:, : self._rows].view(batch, heads, queries, group, -1)
        if bias is not None:
            shown.add_(bias.view(batch, heads, 1, 1, -1))
        shown.masked_fill_(unseen[:, :, :, None], -torch.inf)
        before, self._peak = self._peak, torch.maximum(self._peak, scores.amax(-1, keepdim=True))
        weights = scores.sub_(self._peak).exp_()
        decay = before.sub_(self._peak).exp_()
        self._total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        self._out.mul_(decay).add_(torch.bmm(weights, v))

    def result(self) -> Tensor:
        batch, heads, queries, group = self._shape
        out = self._out.div_(self._total.clamp_min_(1e-30))[:, : self._rows]
        out = out.view(batch, heads, queries, group, -1).transpose(1, 2)
        return out.reshape(batch, queries, heads * group, -1).to(self._dtype)


def _held(pos: Tensor, lengths: Tensor) -> Tensor:
    """Positions [B, H, S], past any query's from `lengths` [B, H, 1] on."""
    cell = torch.arange(pos.shape[2], device=pos.device)
    return pos.masked_fill_(cell >= lengths, torch.iinfo(pos.dtype).max)


def _cells(pool: Tensor, pages: Tensor) -> Tensor:
    """The cells of whole splits, float32: [B * H, S, D]."""
    return pool.index_select(0, pages).view(-1, SPLIT, pool.shape[2]).float()


def _packed_split(packed: PackedCells, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One packed page of each head, unpacked."""
    pages = packed.table[:, :, group].flatten()
    k = unpack_keys(packed.k[pages], packed.k_grid[pages], packed.bits)
    v = unpack_values(packed.v[pages], packed.v_grid[pages], packed.bits)
    pos = packed.pos[pages].view(*packed.table.shape[:2], PACK)
    bias = None if packed.bias is None else packed.bias[pages]
    return k, v, _held(pos, packed.fill[:, :, group, None]), bias
