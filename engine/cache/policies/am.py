"""Keep the keys with the most attention, and fit biases and values for what went.

Attention Matching with HighestAttentionKeys and a uniform budget, TAM's baseline (arXiv 2608.12331
calls it PAM); see `engine/cache/matching.py` for the fits and what differs there. Every window
compacts all that is held but the tail, so what was fitted is fitted again: the papers' "AM +
repeat". The budget counts the tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from engine.cache.choose import keep_mask
from engine.cache.matching import Choice, MatchingPolicy, check_fields, mean_weight
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class AM(MatchingPolicy):
    """`queries` last positions' queries are the reference; a key's attention is its mean over them,
    its greatest, or its root mean square (`score`)."""

    queries: int = 64
    tail: int | None = None
    ridge: float = 1e-3
    score: Literal["mean", "max", "rms"] = "mean"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.score not in ("mean", "max", "rms"):
            raise ValueError(f"score must be mean, max or rms, not {self.score!r}")

    def choose(self, view: LayerView, weights: Tensor, prefix: Tensor, budget: Tensor) -> Choice:
        if self.score == "mean":
            score = mean_weight(weights)
        else:
            score = weights.amax(2) if self.score == "max" else weights.square().sum(2)
        stays = keep_mask(score, prefix, budget)
        return Choice(stays, stays.new_zeros(()).expand(stays.shape))
