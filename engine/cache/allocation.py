"""HOW MANY cells each layer and head holds: the seam that works under any policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from torch import Tensor

from engine.cache.view import KVShape


class Allocation(ABC):
    """How many cells each layer and head holds right after a compaction.

    `by_utility`: whether head budgets depend on what cells are worth, which is worked out then.
    """

    @property
    def by_utility(self) -> bool:
        return True

    @abstractmethod
    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        """Cells per head of each layer, summing to layers * budget. Admission counts on it."""

    @abstractmethod
    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        """Cells of each head, [S, H] int64, summing to H * total in every slot.

        utility, valid [S, H, N]: what cells are worth, infinity for those that the policy protects.
        """

    def measured(self, model: Path) -> Allocation:
        """This, with what was measured of the model whose files lie there; ValueError says how to
        measure."""
        return self
