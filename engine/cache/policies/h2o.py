"""Keep the heavy hitters: cells that gathered most attention.

H2O (Zhang et al. 2023, arXiv 2306.14048): half of the budget for the cells with the largest sum of
attention over all queries so far, half for recent ones. What differs: the sum is over the last
`queries` queries before a compaction, as nothing else remembers them; a kv head's query heads are
averaged, sinks are protected (sinks=0: not), and `window` cells go at once, not one a token. The
paper's budget (heavy + recent) is budget_tokens. R-KV's code calls H2O what is
`snapkv(queries=1, kernel=1)` here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.cache import checks
from engine.cache.policy import ScorePolicy
from engine.cache.scores import older, window_attention
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class H2O(ScorePolicy):
    """`queries` last queries are summed over; half of the budget (or `recent`) is recent."""

    queries: int = 64
    sinks: int | None = None
    recent: int | None = None

    cells_at_once = 2**13

    def __post_init__(self) -> None:
        checks.at_least(1, queries=self.queries)

    @property
    def usual_recent(self) -> int:
        return 2**30  # all of the half that recent cells may have

    def score(self, view: LayerView, budget: int) -> Tensor:
        return window_attention(view, older(view, 0), "softmax")
