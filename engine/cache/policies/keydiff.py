"""Keep the cells whose keys are unlike the others.

KeyDiff (Park et al. 2025, arXiv 2504.15364): a key close to the mean direction of all keys is
redundant. What differs: sinks are protected (sinks=0: not), and the prompt is kept whole until its
end. The paper's budget is budget_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from engine.cache.policy import ScorePolicy
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class KeyDiff(ScorePolicy):
    """`sinks` first tokens and `recent` last cells stay whatever their keys."""

    sinks: int | None = None
    recent: int | None = None

    def score(self, view: LayerView, budget: int) -> Tensor:
        keys = F.normalize(view.k.float(), dim=-1) * view.valid[..., None]  # [S, H, N, D]
        mean = keys.sum(2, keepdim=True) / view.valid.sum(-1)[..., None, None]  # [S, H, 1, D]
        return -F.cosine_similarity(keys, mean, dim=-1)  # [S, H, N]
