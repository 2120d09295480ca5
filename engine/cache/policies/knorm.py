"""Keep the cells whose keys are short.

Knorm (Devoto et al. 2024, arXiv 2406.11430): keys of a small L2 norm draw much attention. What
differs: sinks are protected (sinks=0: not), and the prompt is kept whole until its end. The paper's
share of cells kept is budget_tokens here.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.cache.policy import ScorePolicy
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Knorm(ScorePolicy):
    """`sinks` first tokens and `recent` last cells stay whatever their keys."""

    sinks: int | None = None
    recent: int | None = None

    def score(self, view: LayerView, budget: int) -> Tensor:
        return -view.k.float().norm(dim=-1)
