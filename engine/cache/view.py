"""What a KV policy sees and answers: a view of cells, and a Compaction. Never a page.

Letters of shapes: S layers (of one slot, or of several), H kv heads, Hq query heads, N cells on
offer (padded), D head_dim, W remembered queries, M cells kept (padded), B boundaries (padded).
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
    """The cells of tokens at positions [start, end), gathered dense: a row of S is one layer of one
    slot, and no row may change what becomes of another.

    Cells of other positions aren't on offer: they stay as they are. `bias` is there for policies
    with `bias`. `thoughts` are the boundaries so far: the prompt's end, then the end of each
    thought (the position after its last token). `key` is what a slot's random choices are keyed by
    (its seed, its lineage, where this compaction is); see `noise.uniform`.
    """

    layer: Tensor  # [S] int64
    start: int
    end: int
    k: Tensor  # [S, H, N, D] keys with the rotation they were born with
    v: Tensor  # [S, H, N, D]
    pos: Tensor  # [S, H, N] int64, the tokens' positions, ascending where valid
    valid: Tensor  # [S, H, N] bool
    queries: Tensor | None  # [S, W, Hq, D] post-RoPE queries of the last positions
    query_pos: Tensor | None  # [S, W] int64, -1: none
    bias: Tensor | None = None  # [S, H, N] float32, added to a cell's logits
    thoughts: Tensor | None = None  # [S, B] int64, ascending, -1 at the end
    key: Tensor | None = None  # [S] int64


class Compaction(NamedTuple):
    """Which cells of a view stay, and what becomes of them.

    `keep` are indices into N, ascending, padded with -1 at the end. A cell that stays keeps its
    position, and its key, value and bias unless the rows given here replace them: any of `k`, `v`
    and `bias`, aligned to `keep`, what stands at its padding ignored; all finite. A policy that
    gives a bias says so by `bias = True`.
    """

    keep: Tensor  # [S, H, M] int64
    k: Tensor | None = None  # [S, H, M, D]
    v: Tensor | None = None  # [S, H, M, D]
    bias: Tensor | None = None  # [S, H, M]
