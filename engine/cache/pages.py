"""Pages: fixed runs of cells of one head of one layer, counted by reference.

The pool knows ids only; what lies in a page is `format.py`'s. A page is free, or referenced by
slots, or kept by the prefix cache, or both; a kept page that no slot refers to is idle, and may be
had back by evicting it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.kernels.attention import PAGE as PAGE  # for its neighbours: kernels define it

Ints = NDArray[np.int32]


class Meter:
    """Bytes of the used pages of some pools, and the most that there ever were."""

    def __init__(self) -> None:
        self.pools: list[tuple[PagePool, int]] = []
        self.peak = 0

    @property
    def used(self) -> int:
        return sum(pool.used * size for pool, size in self.pools)

    def look(self) -> None:
        self.peak = max(self.peak, self.used)


class PagePool:
    """A free stack and reference counts. Every call takes distinct ids, in any shape."""

    def __init__(self, pages: int, page_bytes: int = 0, meter: Meter | None = None) -> None:
        self.pages = pages
        self._meter = Meter() if meter is None else meter
        self._meter.pools.append((self, page_bytes))
        self.refs: Ints = np.zeros(pages, dtype=np.int32)
        self.kept: NDArray[np.bool_] = np.zeros(pages, dtype=np.bool_)
        self.idle = 0  # kept, and referenced by nobody else
        self.free = pages
        self.peak = 0  # most pages that slots ever referred to at once
        self._stack: Ints = np.arange(pages, dtype=np.int32)[::-1].copy()  # [:free] are free

    @property
    def used(self) -> int:
        """Pages that some slot refers to."""
        return self.pages - self.free - self.idle

    def take(self, count: int) -> Ints:
        """`count` free pages, [count], each with one reference."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        self.free -= count
        taken = self._stack[self.free : self.free + count][::-1].copy()
        self.refs[taken] = 1
        self._look()
        return taken

    def share(self, ids: Ints) -> None:
        """One more reference to each."""
        self.idle -= self._idle(ids)
        self.refs[ids] += 1
        self._look()

    def drop(self, ids: Ints) -> None:
        """One reference less to each; those without any are free."""
        self.refs[ids] -= 1
        self.idle += self._idle(ids)
        self._free(ids)

    def keep(self, ids: Ints) -> None:
        """The prefix cache's own reference to pages that a slot refers to."""
        assert not self.kept[ids].any()
        self.kept[ids] = True
        self.refs[ids] += 1

    def unkeep(self, ids: Ints) -> None:
        """The prefix cache lets go."""
        self.idle -= self._idle(ids)
        self.kept[ids] = False
        self.refs[ids] -= 1
        self._free(ids)

    def _look(self) -> None:
        self.peak = max(self.peak, self.used)
        self._meter.look()

    def _idle(self, ids: Ints) -> int:
        return int(np.count_nonzero(self.kept[ids] & (self.refs[ids] == 1)))

    def _free(self, ids: Ints) -> None:
        freed = ids[self.refs[ids] == 0]
        self._stack[self.free : self.free + freed.size] = freed
        self.free += freed.size

    def check(self) -> None:
        """The stack holds exactly the pages without a reference, once each."""
        stack = np.sort(self._stack[: self.free])
        assert np.array_equal(stack, np.flatnonzero(self.refs == 0)), "free stack"
        assert (self.refs >= 0).all(), "negative reference count"
        assert not (self.kept & (self.refs == 0)).any(), "a kept page is free"
        assert self.idle == np.count_nonzero(self.kept & (self.refs == 1)), "idle count"
