"""Deep layers hold fewer cells: budgets fall linearly from the first layer to the last.

PyramidKV (Cai et al. 2024, arXiv 2406.02069), as a baseline of ReasonAlloc: of what a budget holds
beyond the `recent` cells that every layer has, the last layer gets 1 / beta of the mean, the first
what makes the mean right. What differs: sums are exact (largest remainder). kvpress has recent=64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache import checks
from engine.cache.allocation import Allocation
from engine.cache.choose import rounded
from engine.cache.view import KVShape


@dataclass(frozen=True, kw_only=True)
class Pyramid(Allocation):
    """`recent` cells of each layer aren't shared out, at most half of the budget."""

    beta: float = 20.0
    recent: int = 8

    def __post_init__(self) -> None:
        checks.at_least(1, beta=self.beta)
        checks.at_least(0, recent=self.recent)

    @property
    def by_utility(self) -> bool:
        return False

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        even = min(self.recent, budget // 2)
        last = (budget - even) / self.beta
        first = 2 * (budget - even) - last
        slope = torch.linspace(first, last, shape.layers, dtype=torch.float64)
        slope += budget - even - slope.mean()  # a single layer has the mean
        return rounded(even + slope, budget * shape.layers).tolist()

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        return torch.full(utility.shape[:2], total, dtype=torch.int64, device=utility.device)
