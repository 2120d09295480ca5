"""What a KV policy sees and answers: a view of cells, and a Compaction. Never a page.

Letters of shapes: S slots, H kv heads, Hq query heads, N cells on offer (padded), D head_dim,
W remembered queries, M cells kept (padded).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVShape(NamedTuple):
    """One model's cache geometry."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads


class LayerView(NamedTuple):
    """The cells [start, end) of some slots in one layer, gathered dense; others aren't on offer."""

    layer: int
    start: int
    end: int
    k: Tensor  # [S, H, N, D] keys with the rotation they were born with
    v: Tensor  # [S, H, N, D]
    pos: Tensor  # [S, H, N] int64, the tokens' positions, ascending where valid
    valid: Tensor  # [S, H, N] bool
    queries: Tensor | None  # [S, W, Hq, D] post-RoPE queries of the last positions
    query_pos: Tensor | None  # [S, W] int64, -1: none


class Compaction(NamedTuple):
    """Which cells of a view stay: indices into N, ascending, padded with -1 at the end.

    Replacement rows, biases and packing (design.md section 5) come with the methods that need them.
    """

    keep: Tensor  # [S, H, M] int64
