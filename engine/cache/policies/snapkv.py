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

from torch import Tensor

from engine.cache import checks
from engine.cache.policy import ScorePolicy
from engine.cache.scores import GROUPS, Group, max_pool, older, window_attention
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class SnapKV(ScorePolicy):
    """`queries` last queries score, and as many last cells (or `recent`) stay; see the module."""

    queries: int = 8
    kernel: int = 7
    group: Group = "max"
    sinks: int | None = None
    recent: int | None = None

    def __post_init__(self) -> None:
        checks.at_least(1, queries=self.queries)
        checks.kernel(self.kernel)
        checks.one_of(GROUPS, group=self.group)

    @property
    def usual_recent(self) -> int:
        return self.queries

    def score(self, view: LayerView, budget: int) -> Tensor:
        seen = window_attention(view, older(view, self.queries), self.group)
        return max_pool(seen, self.kernel)
