"""How many cells a head: a spec's budgets, layer by layer, for whatever a request asks."""

from __future__ import annotations

from engine.cache.pages import PAGE
from engine.cache.policy import FULL, KVSpec
from engine.cache.view import KVShape


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

    def pages(self, budget: int, prompt: int, total: int, spare: int = 0) -> int:
        """Pages of all heads at their peak, with `spare` more for each."""
        policy, window = self._spec.policy, self._spec.window
        peaks = [
            total if policy is None or cells == FULL else policy.peak(prompt, total, cells, window)
            for cells in self.layers(budget)
        ]
        return self._shape.kv_heads * sum(-(-peak // PAGE) + spare for peak in peaks)
