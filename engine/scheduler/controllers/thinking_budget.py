"""An exact thinking budget: after so many tokens of thinking the model is made to close it.

When `SamplingParams.thinking_token_budget` tokens of chain have been generated and it is still
open, the closing phrase is forced, and the model goes on with its answer. The phrase isn't counted
(see reasoning.py), so a chain never passes its budget. A model that closes in time is left alone.
All blocks of an output share the budget: one that is opened when it is spent is closed at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.request import Sequence
from engine.scheduler.controller import Controller, Edit, TokenEvent, Watch
from engine.scheduler.reasoning import ChainTracker, Markers, track_chain


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget(Controller):
    """Closes the thinking of requests that have a budget, with `markers.closing`."""

    markers: Markers
    token_bytes: Callable[[int], bytes]

    def __post_init__(self) -> None:
        if not self.markers.closing:
            raise ValueError("a thinking budget needs markers.closing: how the thinking is closed")

    def watch(self) -> BudgetWatch:
        return BudgetWatch(self)


class BudgetWatch(Watch):
    """Counts one sequence's thinking."""

    _chain: ChainTracker

    def __init__(self, controller: ThinkingBudget) -> None:
        self._controller = controller
        self._forced_to = 0  # where the closing phrase under way ends

    def begin(self, seq: Sequence) -> Edit | None:
        if seq.params.thinking_token_budget is None:
            return None
        markers = self._controller.markers
        self._chain = track_chain(markers, seq.tokens, self._controller.token_bytes)
        return self._close(seq)

    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        """A sampled token while it is still open: the phrase was cut short, so it comes again."""
        if seq.params.thinking_token_budget is None:
            return None
        self._chain.feed(event.token)
        if event.origin == "forced" and event.position < self._forced_to:
            return None
        return self._close(seq)

    def _close(self, seq: Sequence) -> Edit | None:
        budget, closing = seq.params.thinking_token_budget, self._controller.markers.closing
        if budget is None or not self._chain.thinking or self._chain.thinking_tokens < budget:
            return None
        self._forced_to = len(seq.tokens) + len(closing)
        return Edit(append=closing)

    def rewound(self, seq: Sequence, pos: int) -> None:
        if seq.params.thinking_token_budget is None:
            return
        self._chain.rewind(pos)
        self._forced_to = min(self._forced_to, pos)
