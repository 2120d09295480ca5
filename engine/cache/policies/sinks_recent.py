"""Keep the first tokens and the last ones.

StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): attention parks on the first few tokens, so a
window of recent cells works only beside them. What differs: the paper gives cells positions inside
the cache and evicts one a token; here keys keep the rotation that they were born with, and `window`
cells go at once. The budget counts the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.cache.policy import ScorePolicy
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class SinksRecent(ScorePolicy):
    """`sinks` first tokens (None: 4, fewer at budgets below 32), the rest of the budget recent.

    The prompt streams through the same window.
    """

    sinks: int | None = None

    streams_prompt = True

    def score(self, view: LayerView, budget: int) -> Tensor:
        return view.pos.float()
