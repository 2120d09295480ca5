"""Keep the cells that the last queries look at, less those that repeat others.

R-KV (Cai et al. 2025, arXiv 2505.24133): score = mix * attention - (1 - mix) * redundancy, where
attention is SnapKV's of the last 8 queries, and redundancy the softmax of a key's mean cosine with
its head's other keys, the newest alike spared. Two published sets of parameters:

- `rkv()`: the paper's (the authors' code has mix=0.07);
- `rkv(queries=64, mix=0.5, kernel=5, pool='mean', group='softmax', threshold=None)`: the baseline
  in VaSE's code (arXiv 2606.03928): a softmax for each query head, and nothing spared.

What differs: sinks are protected (set sinks=0 for the paper's form), and the prompt is compacted
at its end. The paper's label B with its buffer of 128 is budget_tokens=B, window=128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.cache import checks
from engine.cache.policy import ScorePolicy
from engine.cache.scores import (
    GROUPS,
    Group,
    max_pool,
    mean_pool,
    older,
    redundancy,
    window_attention,
)
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class RKV(ScorePolicy):
    """`mix` is attention's share, `threshold` the cosine above which keys are alike; as many last
    cells as `queries` (or `recent`) stay; see the module."""

    queries: int = 8
    mix: float = 0.1
    kernel: int = 7
    pool: Literal["max", "mean"] = "max"
    group: Group = "max"
    threshold: float | None = 0.5
    sinks: int | None = None
    recent: int | None = None

    cells_at_once = 2**12  # each is compared with each

    def __post_init__(self) -> None:
        checks.at_least(1, queries=self.queries)
        checks.share(mix=self.mix)
        checks.kernel(self.kernel)
        checks.one_of(("max", "mean"), pool=self.pool)
        checks.one_of(GROUPS, group=self.group)
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise ValueError(f"threshold must be a cosine in (0, 1) or None, not {self.threshold}")

    @property
    def usual_recent(self) -> int:
        return self.queries

    def score(self, view: LayerView, budget: int) -> Tensor:
        pooled = max_pool if self.pool == "max" else mean_pool
        seen = window_attention(view, older(view, self.queries), self.group)
        alike = redundancy(view.k, view.valid, self.threshold)
        return self.mix * pooled(seen, self.kernel) - (1 - self.mix) * alike
