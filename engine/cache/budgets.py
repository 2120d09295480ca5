"""How many cells a head: a spec's budgets, layer by layer, for whatever a request asks."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from engine.cache.format import KVFormat
from engine.cache.groups import Groups
from engine.cache.pages import PAGE
from engine.cache.policy import FULL, KVSpec
from engine.cache.view import KVShape
from engine.kernels.packed import PACK


class Budgets:
    """One cache's. Made of a spec once, with the layers of its own budget checked."""

    def __init__(self, shape: KVShape, spec: KVSpec) -> None:
        self._shape = shape
        self._spec = spec
        self._layers: dict[int, list[int]] = {FULL: [FULL] * shape.layers}
        self.layers(spec.budget)

    def layers(self, budget: int) -> list[int]:
        """Cells a head of each layer. ValueError: the allocation's don't sum to the budget."""
        known = self._layers.get(budget)
        if known is not None:
            return known
        allocation, shape = self._spec.allocation, self._shape
        found = allocation.layer_budgets(shape, budget)
        if len(found) != shape.layers or sum(found) != budget * shape.layers or min(found) < 1:
            raise ValueError(
                f"allocation {allocation} gives {found} for {shape.layers} layers; they must sum to"
                f" {budget} cells a layer, with at least 1 each"
            )
        self._layers[budget] = found
        return found

    def grows(self, budget: int) -> bool:
        """Whether a slot of this budget needs more the longer it runs."""
        policy = self._spec.policy
        return policy is None or budget == FULL or not policy.bounded

    def peaks(self, budget: int, prompt: int, total: int) -> list[int]:
        """Cells a head of each layer, at most."""
        policy, window = self._spec.policy, self._spec.window
        return [
            total if policy is None or cells == FULL else policy.peak(prompt, total, cells, window)
            for cells in self.layers(budget)
        ]


class Need(Protocol):
    """What a slot needs of one pool."""

    @property
    def shares(self) -> bool:
        """Whether a page that several refer to counts once."""

    def grows(self, budget: int) -> bool:
        """Whether a slot of this budget needs more the longer it runs."""

    def pages(self, budget: int, prompt: int, total: int, spare: int = 0) -> int:
        """Pages of all heads at their peak, with `spare` more for each where heads are ragged."""


class PlainNeed(NamedTuple):
    """Of plain pages, where there are no others."""

    budgets: Budgets
    kv_heads: int
    shares: bool

    def grows(self, budget: int) -> bool:
        return self.budgets.grows(budget)

    def pages(self, budget: int, prompt: int, total: int, spare: int = 0) -> int:
        peaks = self.budgets.peaks(budget, prompt, total)
        return self.kv_heads * sum(-(-peak // PAGE) + spare for peak in peaks)


class TailNeed(NamedTuple):
    """Of plain pages beside packed ones: no head ever has more than its tail in them, even if it
    holds more than others."""

    budgets: Budgets
    kv_heads: int
    format: KVFormat
    shares: bool = False

    def grows(self, budget: int) -> bool:
        return False

    def pages(self, budget: int, prompt: int, total: int, spare: int = 0) -> int:
        most = -(-self.format.tail_cells // PAGE)
        peaks = self.budgets.peaks(budget, prompt, total)
        return self.kv_heads * sum(min(-(-peak // PAGE) + spare, most) for peak in peaks)


class PackedNeed(NamedTuple):
    """Of packed pages. Cells are packed wherever the tail is left plain; after a compaction all may
    be packed ones, but then the next window is still to come."""

    budgets: Budgets
    kv_heads: int
    format: KVFormat
    window: int
    shares: bool

    def grows(self, budget: int) -> bool:
        return self.budgets.grows(budget)

    def pages(self, budget: int, prompt: int, total: int, spare: int = 0) -> int:
        peaks = self.budgets.peaks(budget, prompt, total)
        if self.shares:  # no compaction leaves a page partly filled
            each = [max(peak - self.format.tail, 0) // PACK + spare for peak in peaks]
        else:
            left = min(self.format.tail, self.window)
            each = [Groups.most_pages(max(peak - left, 0)) + spare for peak in peaks]
        return self.kv_heads * sum(each)
