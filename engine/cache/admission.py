"""Who may take how many pages: promises made at admission, and what they leave for others.

A bounded slot is promised its peak, so it's never preempted for want of pages of its own. A growing
slot (the full cache, or a policy that isn't bounded) is promised what its tokens so far need and a
page a head more; beyond that it takes what is there. Where no slot is ever compacted, a page that
several share counts once; elsewhere it counts for each, because a compaction may un-share it.
A cache of packed cells has two ledgers, one for each pool: what its plain pages hold is bounded.
`spare` rooms wait for children: a borrowed one goes back when the child goes, and if the lender
goes first, its child inherits what it had.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.cache.budgets import Need
from engine.cache.pages import PagePool
from engine.request import Sequence


class Ledger:
    """Promises, in pages of one pool, of every slot.

    `held` are the pages that each slot has, `budget` its cells a head.
    """

    def __init__(
        self, need: Need, heads: int, pool: PagePool, held: Seq[int], budget: Seq[int]
    ) -> None:
        slots = len(held)
        self.shares = need.shares
        self._need = need
        self._heads = heads
        self._pool = pool
        self._held = held
        self._budget = budget
        self.live: set[int] = set()
        self.promised = [0] * slots
        self.spare = [0] * slots
        self._unit = [0] * slots  # what a spare room is
        self._lender = [-1] * slots

    @property
    def pages(self) -> int:
        """All that there are."""
        return self._pool.pages

    def least(self, prompt: int, budget: int) -> int:
        """Pages without which a prompt and one token can't run."""
        return self._need.pages(budget, prompt, prompt + 1)

    def promise(self, seq: Sequence, budget: int, max_len: int) -> int:
        """Pages to promise at admission. A sequence too large for the pool is promised all of it
        and ends when that is full."""
        total = len(seq.tokens)
        if not self._need.grows(budget):
            new = max_len if seq.params.max_tokens is None else seq.params.max_tokens
            total = min(max_len, max(total + 1, seq.prompt_len + new))
        # One page a head more: a bounded slot's heads are ragged, a growing one runs a little.
        pages = self._need.pages(budget, seq.prompt_len, total, spare=1)
        return min(pages, self._pool.pages)

    def available(self) -> int:
        """Pages that nobody was promised."""
        held, promised = self._held, self.promised
        spare = sum(self.spare[s] * self._unit[s] for s in self.live)
        if self.shares:
            owed = sum(max(promised[s] - held[s], 0) for s in self.live)
            return self._pool.free + self._pool.idle - owed - spare
        return self._pool.pages - sum(max(promised[s], held[s]) for s in self.live) - spare

    def room(self, slot: int) -> int:
        """Pages that the slot may take now."""
        own = max(self.promised[slot] - self._held[slot], 0)
        # Truncating shared pages frees none: then promises of slots that share fall short.
        return max(self.available() + own, 0)

    def copied(self, slot: int, pages: int) -> None:
        """The slot holds as many pages as before, but these it shared and now are its own."""
        if self.shares:
            self.promised[slot] -= pages

    def admit(self, slot: int, promise: int, spare: int, shared: int) -> bool:
        """Promise, if there's room; `shared` pages are used by others anyway."""
        unit = self._heads if self.shares else promise
        spare = min(spare, (self._pool.pages - promise) // max(unit, 1))
        cost = promise + spare * unit - (shared if self.shares else 0)
        if cost > self.available():
            return False
        self._enter(slot, promise, spare, unit)
        return True

    def fork(self, slot: int, child: int, branch: bool, spare: int) -> bool:
        """Promise a child of `slot` its room: a branch takes a spare one if there is one."""
        held, unit = self._held[slot], self._unit[slot]
        promise = unit
        if self._need.grows(self._budget[slot]):
            promise = held + self._heads if self.shares else max(held + self._heads, unit)
        borrowed = branch and self.spare[slot] > 0
        cost = spare * unit + (unit if self.shares else max(promise, held))
        if cost - (unit if borrowed else 0) > self.available():
            return False
        self._enter(child, promise, spare, unit)
        if borrowed:
            self.spare[slot] -= 1
            self._lender[child] = slot
        return True

    def _enter(self, slot: int, promise: int, spare: int, unit: int) -> None:
        self.live.add(slot)
        self.promised[slot], self.spare[slot], self._unit[slot] = promise, spare, unit
        self._lender[slot] = -1

    def release(self, slot: int) -> None:
        """The slot's promise ends."""
        self.live.remove(slot)
        if self._lender[slot] in self.live:
            self.spare[self._lender[slot]] += 1
        heirs = [s for s in self.live if self._lender[s] == slot]
        for other in heirs[1:]:
            self._lender[other] = heirs[0]
        if heirs:  # the lender's own room becomes a spare one, its child a sequence of its own
            self._lender[heirs[0]] = -1
            self.spare[heirs[0]] += self.spare[slot] + 1

    def check(self) -> None:
        if not self.shares:
            assert self.available() >= 0, "more promised than there is"
        assert all(self.spare[s] >= 0 for s in self.live)
