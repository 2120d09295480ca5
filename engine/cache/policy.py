"""The seams of lossy caching: KVSpec (what is configured), Allocation (how many cells each head
holds), KVPolicy (when and how to compact), ScorePolicy (which cells stay).

A policy is a frozen value whose fields are its paper's hyperparameters. It never sees a page, and
keeps no state: what belongs to a sequence is in the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.cache.view import Compaction, KVShape, LayerView

Rng = Callable[[int], Tensor]
"""Uniform noise for slot s of the view: keyed by (seed, lineage, layer, head, compaction)."""


class Allocation(ABC):
    """HOW MANY cells each layer and head holds right after a compaction."""

    @abstractmethod
    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        """Cells per head of each layer, summing to layers * budget. Admission counts on it."""

    @abstractmethod
    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        """Cells of each head, [S, H] int64, summing to H * total in every slot."""


@dataclass(frozen=True)
class Uniform(Allocation):
    """Every head of every layer holds the budget."""

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        return [budget] * shape.layers

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        return torch.full(utility.shape[:2], total, dtype=torch.int64, device=utility.device)


class KVPolicy(ABC):
    """WHEN a slot is compacted and HOW.

    `held` is the cells a head held after the last compaction (on average over heads), `fresh` the
    cells appended since. `due` is monotone in `fresh`. `queries` is how many last post-RoPE queries
    the view needs. A policy whose `streams_prompt` is false lets the prompt be cached whole and is
    first asked when the prompt's last token is in; one that streams is asked all the way.
    """

    queries: int = 0
    streams_prompt: bool = False

    def peak(self, prompt: int, total: int, budget: int, window: int) -> int:
        """Cells a head needs at most, for a prompt and a total length; admission reserves them."""
        bounded = budget + window
        return min(total, bounded if self.streams_prompt else max(prompt, bounded))

    def due(self, held: int, fresh: int, budget: int, window: int) -> bool:
        """Whether to compact now. Asked after every appended cell."""
        return fresh > 0 and held + fresh >= budget + window

    def span(self, cells: int, budget: int, window: int) -> tuple[int, int]:
        """Which cells [start, end) of `cells` (the largest head's count) are on offer."""
        return 0, cells

    @abstractmethod
    def utility(self, view: LayerView, budget: int) -> Tensor:
        """What each cell is worth, [S, H, N] float32; computed once, for allocation and policy."""

    @abstractmethod
    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        """Which cells stay; `budget` [S, H] cells a head."""


class ScorePolicy(KVPolicy):
    """The common case: protect sinks and recent cells, keep the best-scored of the rest."""

    sinks: int
    recent: int

    @abstractmethod
    def score(self, view: LayerView, budget: int) -> Tensor:
        """[S, H, N] float32, higher stays."""

    # The implementation (protect by +inf, pad by -inf, stable top-k) lives here: see the class body
    # in cache/policy.py when built.


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """How a model's cache stores and bounds its cells.

    `policy` None is the full cache. `budget_tokens` cells a head stay after a compaction, on
    average, everything counted; `window` more may be appended before the next one.
    """

    format: Literal["auto", "fp32", "bf16"] = "auto"
    policy: KVPolicy | None = None
    allocation: Allocation = Uniform()
    budget_tokens: int | None = None
    window: int = 128
