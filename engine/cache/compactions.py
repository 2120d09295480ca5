"""Slots that are due are compacted in the order in which they came, as far as time allows.

None of a slot's tokens runs before its compaction is done, so it may take several steps, and what
it takes of each is bounded: that is what others are held up by.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from engine.cache.compact import Compactor

log = logging.getLogger(__name__)


class Compactions:
    """The line of one cache. `renewed` is told of each slot whose compaction is done."""

    def __init__(self, compactor: Compactor, renewed: Callable[[int], None]) -> None:
        self._compactor = compactor
        self._renewed = renewed
        self._line: dict[int, None] = {}
        self._failures: dict[int, str] = {}
        self.seconds = 0.0  # spent so far
        self.evicted = 0  # cells

    def add(self, slot: int) -> None:
        """The slot is due; if it has failed, nothing more is tried."""
        if slot not in self._failures:
            self._line[slot] = None

    def waits(self, slot: int) -> bool:
        return slot in self._line

    def begun(self, slot: int) -> bool:
        """Whether some of its layers are compacted and others are not yet."""
        return self._compactor.begun(slot)

    def failure(self, slot: int) -> str | None:
        """What the policy raised at the slot, whose cells are good for nothing then."""
        return self._failures.get(slot)

    def forget(self, slot: int) -> None:
        """The slot was emptied, or cut off."""
        self._line.pop(slot, None)
        self._failures.pop(slot, None)
        self._compactor.forget(slot)

    def work(self, slots: Seq[int] | None = None, seconds: float | None = None) -> None:
        """Compact those of the slots that are in line, or all, until the next piece of work would
        take longer than `seconds`; one piece is always done."""
        start = now = time.perf_counter()
        for slot in list(self._line) if slots is None else slots:
            while slot in self._line:
                self._piece(slot)
                before, now = now, time.perf_counter()
                if seconds is not None and 2 * now - before - start > seconds:
                    self.seconds += now - start
                    return
        self.seconds += time.perf_counter() - start

    def _piece(self, slot: int) -> None:
        try:
            done, gone = self._compactor.work(slot)
        except Exception as error:  # the policy is foreign code
            log.exception("the compaction of a slot failed")
            self.forget(slot)
            self._failures[slot] = f"its compaction failed: {type(error).__name__}: {error}"
            return
        self.evicted += gone
        if done:
            del self._line[slot]
            self._renewed(slot)
