"""What one sequence's cache holds over its life, read between the engine's steps.

Each token of a step appends one cell to every head, and compactions come after a step's rows; so
what was held just before one is what was there before the step, and as many cells as it ran tokens.
But a sequence that waited for its compaction, over steps that don't count, has it before its rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.evaluation.records import KVHeld
from engine.cache.allocations.uniform import Uniform
from engine.cache.budgets import Budgets
from engine.cache.paged import PagedCache
from engine.cache.policy import KVSpec
from engine.cache.sizes import SlotUse
from engine.request import MAIN, Sequence

Array = NDArray[np.int64]


class Promise:
    """What a spec promises of a cache: cells a head of each layer, at most."""

    def __init__(self, cache: PagedCache, spec: KVSpec) -> None:
        self._spec = spec
        self._budgets = Budgets(cache.shape, spec)

    def excess(self, seq: Sequence, layers: Array, heads: Array) -> int:
        """Cells beyond it of any layer, `layers` [L], or where all heads hold alike of any head,
        `heads` [L, H]; at most 0 where it was kept."""
        budget = self._spec.granted(seq.params.kv_budget)
        peaks = np.array(self._budgets.peaks(budget, seq.prompt_len, len(seq.tokens)))  # [L]
        over = int((layers - heads.shape[1] * peaks).max())
        if self._spec.allocation == Uniform():
            over = max(over, int((heads - peaks[:, None]).max()))
        return over


class KVWatch:
    """One sequence's figures."""

    def __init__(self, seq: Sequence, cache: PagedCache, promise: Promise) -> None:
        self._seq = seq
        self._cache = cache
        self._promise = promise
        self._last: SlotUse | None = None  # after the step before; None: it has no slot
        self._at = 0  # tokens that had cells then
        self._waited = False  # then, for a compaction, which is done before its next rows run
        self._steps = self._cells = self._bytes = 0
        self._peak_cells = self._peak_bytes = self._side_bytes = 0
        heads = (cache.shape.layers, cache.shape.kv_heads)
        self._heads = np.zeros(heads, dtype=np.int64)  # the most of each
        self._layers = np.zeros(heads[0], dtype=np.int64)

    def look(self) -> None:
        """After each step."""
        slot = self._seq.slots.get(MAIN)
        if slot is None:
            self._last, self._at, self._waited = None, 0, False
            return
        use, now = self._cache.use(slot), self._cache.computed(slot)
        if self._last is None or now > self._at:  # else it waited for its compaction
            self._count(use if self._waited else self._before(use, now))
        self._last, self._at, self._waited = use, now, self._cache.busy(slot)

    def _before(self, use: SlotUse, now: int) -> SlotUse:
        """What was held when the step's rows had run, of a slot with cells of `now` tokens."""
        if self._last is not None and now >= self._at:
            return self._last.grown(now - self._at)
        if use.packed_pages:  # a prefix that was there already may be packed
            return use
        return use._replace(plain=np.zeros_like(use.plain)).grown(now)

    def _count(self, use: SlotUse) -> None:
        cells, nbytes = use.cells, use.cell_bytes
        total = int(cells.sum())
        self._steps += 1
        self._cells += total
        self._bytes += nbytes
        self._peak_cells = max(self._peak_cells, total)
        if nbytes > self._peak_bytes:
            self._peak_bytes, self._side_bytes = nbytes, use.side_bytes
        np.maximum(self._heads, cells, out=self._heads)
        np.maximum(self._layers, cells.sum(-1), out=self._layers)

    def end(self) -> KVHeld:
        """When it is finished and its slot is gone."""
        if self._last is not None:  # its last token was sampled and has no cell
            self._count(self._last.grown(max(len(self._seq.tokens) - 1 - self._at, 0)))
        steps = max(self._steps, 1)
        return KVHeld(
            peak_cells=self._peak_cells,
            peak_bytes=self._peak_bytes,
            mean_cells=self._cells / steps,
            mean_bytes=self._bytes / steps,
            side_bytes=self._side_bytes,
            excess_cells=self._promise.excess(self._seq, self._layers, self._heads),
        )
