"""Heads of a layer compete: each holds as many cells as it has among the layer's best.

Ada-KV (Feng et al. 2024, arXiv 2407.11550): the scores of a layer's heads are pooled and the best
kept, with a part of the uniform budget safe for each head. What differs: it is done again at each
compaction, and protected cells count as best.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache import checks
from engine.cache.allocation import Allocation
from engine.cache.choose import best_of_layer, keep_mask, shared
from engine.cache.view import KVShape


@dataclass(frozen=True, kw_only=True)
class AdaKV(Allocation):
    """`safe`: the part of the budget that no other head can take."""

    safe: float = 0.2

    def __post_init__(self) -> None:
        checks.share(safe=self.safe)

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        return [budget] * shape.layers

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        heads = utility.shape[1]
        own = torch.full_like(valid[..., 0], int(self.safe * total), dtype=torch.int64)
        utility = utility.masked_fill(keep_mask(utility, valid, own), torch.inf)
        counts = best_of_layer(utility, valid, heads * total)
        return shared(counts, heads * total, counts, counts)  # all of them: the rest is even
