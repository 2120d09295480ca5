"""Keep the cells that the last queries look at.

SnapKV (Li et al. 2024, arXiv 2404.14469), at decode time too, in the form of R-KV's code (Cai et
al. 2025, arXiv 2505.24133): the logits of a kv head's queries are pooled over the group, softmaxed
over the candidates (all cells but the last W), averaged over the last W queries and max-pooled over
neighbouring cells; the last W cells always stay. What differs: SnapKV itself compresses the prompt
once, after the softmax over all cells, with a window of 16 to 64 queries; here each compaction
scores all cells again. Sinks are protected (set sinks=0 for the papers' form). The budget counts
everything: R-KV's label B with its buffer of 128 is budget_tokens=B, window=128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.cache.policy import ScorePolicy
from engine.cache.scores import attention, group_logits, max_pool, mean_over_queries
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class SnapKV(ScorePolicy):
    """`queries` last queries score, and as many last cells (or `recent`) stay; see the module."""

    queries: int = 8
    kernel: int = 7
    group: Literal["max", "mean"] = "max"
    sinks: int | None = None
    recent: int | None = None

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries must be at least 1, not {self.queries}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd and at least 1 (no pooling), not {self.kernel}")
        if self.group not in ("max", "mean"):
            raise ValueError(f"group must be max or mean, not {self.group!r}")

    @property
    def usual_recent(self) -> int:
        return self.queries

    def score(self, view: LayerView, budget: int) -> Tensor:
        assert view.queries is not None
        assert view.query_pos is not None
        logits = group_logits(view.queries, view.k, self.group)  # [S, H, W, N]
        cells = view.valid.sum(-1, keepdim=True)  # [S, H, 1]
        index = torch.arange(view.valid.shape[-1], device=view.valid.device)
        candidates = index < cells - self.queries  # [S, H, N]
        weights = attention(logits, candidates[:, :, None])
        return max_pool(mean_over_queries(weights, view.query_pos), self.kernel)
