"""When a slot is compacted: at positions that depend on its sequence alone.

A policy is asked ahead, at construction of each round: `limit` is where it's due whatever the text,
`early` the soonest that it's due if a thought ends there. Where thoughts end among the tokens that
may run is known before they run, so rows never cross a point.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from engine.cache.budgets import Budgets
from engine.cache.policy import FULL, KVSpec
from engine.cache.tables import NEVER, Tables


class Points:
    """Keeps `limit`, `early` and `point` of the tables."""

    def __init__(self, spec: KVSpec, budgets: Budgets, tables: Tables) -> None:
        self._policy = spec.policy
        self._window = spec.window
        self._budgets = budgets
        self._tables = tables

    def renew(self, slot: int) -> None:
        """The slot is new, or was emptied or compacted."""
        tables, policy = self._tables, self._policy
        limit = early = NEVER
        if policy is not None and tables.budget[slot] != FULL:
            prompt = tables.prompt_len[slot]
            limit = self._first(slot, thought_ended=False)
            # no thought ends before the prompt does
            early = min(limit, max(self._first(slot, thought_ended=True), prompt + 1))
        tables.limit[slot] = tables.point[slot] = limit
        tables.early[slot] = early

    def _first(self, slot: int, thought_ended: bool) -> int:
        """The first position after the last compaction where the policy is due."""
        tables, policy, window = self._tables, self._policy, self._window
        assert policy is not None
        prompt, last = tables.prompt_len[slot], tables.compacted_at[slot]
        first, kept = last + 1, 0
        if policy.keeps_prompt:
            last, kept = max(last, prompt), prompt
            first = last + 1
        elif not policy.streams_prompt:
            first = max(first, prompt)
        base = (max(cells - kept, 0) for cells in tables.base[slot].tolist())
        layers = set(zip(base, self._budgets.layers(tables.budget[slot]), strict=True))

        def due(fresh: int) -> bool:
            return any(
                policy.due(held, fresh, budget, window, thought_ended) for held, budget in layers
            )

        return last + bisect_left(range(NEVER - last), True, lo=first - last, key=due)

    def look(self, slot: int) -> None:
        """Set the point by the thoughts that are known to end ahead."""
        tables = self._tables
        early, limit = tables.early[slot], tables.limit[slot]
        if early == limit:
            return
        ends = tables.whose[slot].thought_ends
        at = bisect_right(ends, max(early - 1, tables.computed[slot]))
        tables.point[slot] = min(ends[at], limit) if at < len(ends) else limit
