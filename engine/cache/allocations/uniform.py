"""Every head of every layer holds the budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.allocation import Allocation
from engine.cache.view import KVShape


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same for all."""

    @property
    def by_utility(self) -> bool:
        return False

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        return [budget] * shape.layers

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        return torch.full(utility.shape[:2], total, dtype=torch.int64, device=utility.device)
