"""The paged cache of one model: append, truncate, fork, release, and compaction.

A slot is a sequence's row in the tables; its cells are a view of a prefix of that sequence. The
scheduler sees it as a `Capacity` (it admits, reserves, forks, truncates, releases); the executor
plans a step, lets every layer attend, and finishes it. Pages move only in here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from engine.cache.admission import Ledger
from engine.cache.budgets import Budgets
from engine.cache.compact import Compactor
from engine.cache.format import CellStore, cell_dtype
from engine.cache.pages import PAGE, Ints, PagePool
from engine.cache.parts import Parts
from engine.cache.points import Points
from engine.cache.policy import KVSpec
from engine.cache.prefix import PrefixCache, chain_keys
from engine.cache.ring import QueryRing
from engine.cache.room import make_room
from engine.cache.step import Rows, StepKV
from engine.cache.tables import Tables, Whose, pages_for
from engine.cache.view import KVShape
from engine.kernels.attention import Attend
from engine.request import Admission, Sequence


class KVStats(NamedTuple):
    """What the cache holds now, and what it has done."""

    pages: int
    used_pages: int  # referred to by slots
    free_pages: int
    prefix_pages: int  # kept for prompts to come, and evictable
    page_bytes: int  # of keys, values and positions
    peak_pages: int  # most that slots referred to at once
    side_bytes: int  # what isn't cells: biases of all pages, tables and query rings of all slots
    used_side_bytes: int  # of the pages and slots in use
    evicted_cells: int
    compaction_seconds: float  # on the host's clock

    @property
    def used_bytes(self) -> int:
        return self.used_pages * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak_pages * self.page_bytes


class PagedCache:
    """`pages` pages shared by all layers and heads, `slots` sequences of at most `max_len` tokens.

    `attend` is the attention op; `dtype` the model's.
    """

    def __init__(
        self,
        shape: KVShape,
        spec: KVSpec,
        *,
        pages: int,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        attend: Attend,
    ) -> None:
        self.shape = shape
        self.max_len = max_len
        cells = cell_dtype(spec.format, dtype)
        self._page_bytes = CellStore.page_bytes(shape.head_dim, cells)
        self._page_side_bytes = CellStore.page_side_bytes(spec.bias)
        self._slot_bytes = self.slot_bytes(shape, spec, dtype, max_len)
        self._slots = slots
        self._attend = attend
        self._spec = spec
        self._store = CellStore(pages, shape.head_dim, cells, device, spec.bias)
        self._pool = PagePool(pages)
        self._prefix = PrefixCache(self._pool)
        self._tables = Tables(shape, slots, max_len)
        self._budgets = Budgets(shape, spec)
        self._points = Points(spec, self._budgets, self._tables)
        self._ledger = Ledger(shape, spec, self._budgets, self._pool, self._tables)
        self._free_slots = list(range(slots))[::-1]
        self._keys: list[list[bytes]] = [[] for _ in range(slots)]  # of the prompts' full pages
        self._asked: tuple[Sequence | None, list[bytes]] = (None, [])  # the last to ask: its keys
        self._evicted = 0
        self._compacting = 0.0  # seconds
        self._ring: QueryRing | None = None
        self._compactor: Compactor | None = None
        self._queries = spec.queries
        if self._queries:
            self._ring = QueryRing(shape, self._queries, slots, dtype, device)
        self._parts = Parts(self._tables, self._store, self._pool, self._prefix, self._ring)
        if spec.policy is not None:
            self._compactor = Compactor(spec.policy, spec, self._budgets, self._parts)

    @staticmethod
    def page_bytes(shape: KVShape, spec: KVSpec, dtype: torch.dtype) -> int:
        """One page, all told."""
        cells = CellStore.page_bytes(shape.head_dim, cell_dtype(spec.format, dtype))
        return cells + CellStore.page_side_bytes(spec.bias)

    @staticmethod
    def slot_bytes(shape: KVShape, spec: KVSpec, dtype: torch.dtype, max_len: int) -> int:
        """A slot's side state: its tables, and the queries that its policy remembers."""
        ring = QueryRing.slot_bytes(shape, spec.queries, dtype)
        return Tables.slot_bytes(shape, max_len) + ring

    # Capacity: what the scheduler sees

    def refuses(self, tokens: int, kv_budget: int | str | None = None) -> str | None:
        """Why a prompt of so many tokens and one more can never be held, at the budget that the
        request asks for; None if it can."""
        if tokens + 1 > self.max_len:
            return f"{tokens} prompt tokens and one more exceed max_model_len={self.max_len}"
        need = self._ledger.least(tokens, self._spec.granted(kv_budget))
        if need > self._pool.pages:
            page = self._page_bytes + self._page_side_bytes
            return (
                f"{tokens} prompt tokens and one more need {need} pages of KV cache"
                f" ({need * page} bytes); it has {self._pool.pages}"
                f" ({self._pool.pages * page} bytes)"
            )
        return None

    def admit(self, seq: Sequence, spare: int = 0) -> Admission | None:
        """A slot for a sequence, with room for `spare` children besides; None: not now."""
        if not self._free_slots:
            return None
        slot, tables = self._free_slots[-1], self._tables
        tables.clear(slot)
        tables.prompt_len[slot] = seq.prompt_len
        budget = tables.budget[slot] = self._spec.granted(seq.params.kv_budget)
        self._points.renew(slot)
        keys = self._keys_of(seq)
        hit = [] if seq.params.prompt_logprobs is not None else self._prefix.match(keys)
        # At least one prompt token runs, and every token whose query the policy remembers.
        most = min(seq.prompt_len - 1, tables.early[slot] - max(self._queries, 1))
        hit = hit[: max(most, 0) // PAGE]
        pages = np.stack(hit, axis=-1) if hit else np.empty((0,), np.int32)  # [L * H, n]
        shared = int(np.count_nonzero(self._pool.refs[pages] > 1))
        promise = self._ledger.promise(seq, budget, self.max_len)
        if not self._ledger.admit(slot, promise, spare, shared):
            return None
        self._free_slots.pop()
        self._keys[slot] = keys
        if self._ring is not None:
            self._ring.forget(slot, 0)
        if hit:
            self._adopt_prefix(slot, len(hit), pages)
        return Admission(slot, tables.computed[slot])

    def _keys_of(self, seq: Sequence) -> list[bytes]:
        """Of the prompt's full pages; whoever waits first in line is asked for at every step."""
        if self._asked[0] is not seq:
            self._asked = seq, chain_keys(seq.tokens[: seq.prompt_len])
        return self._asked[1]

    def _adopt_prefix(self, slot: int, count: int, pages: Ints) -> None:
        tables = self._tables
        self._prefix.touch(self._keys[slot][:count])
        self._pool.share(pages)
        tables.set_taken(slot, np.full_like(tables.taken[slot], count), pages.reshape(-1))
        tables.length[slot] = count * PAGE
        tables.computed[slot] = tables.ready[slot] = count * PAGE

    def reserve(self, seq: Sequence, slot: int, tokens: int) -> int:
        """How many of the next tokens may run now. They have pages then, of the slot's own."""
        tables = self._tables
        if tables.computed[slot] >= tables.point[slot]:
            # the slot was forked at its point, or adopted in the step that reached it: nobody
            # compacted it after that step, and no cell may follow before
            self.compress([slot])
        tables.whose[slot] = Whose(seq.seed, seq.lineage, seq.thought_ends)
        self._points.look(slot)
        start = tables.computed[slot]
        end = min(start + tokens, tables.point[slot], self.max_len)
        if end > tables.ready[slot]:
            end = make_room(self._parts, self._ledger, slot, end)
        return end - start

    def fork(self, slot: int, child: Sequence, spare: int = 0) -> int | None:
        """A slot for the child, sharing every page; None if there's no room for it."""
        branch = child.parent is not None
        if not self._free_slots or not self._ledger.fork(slot, self._free_slots[-1], branch, spare):
            return None
        new, tables = self._free_slots.pop(), self._tables
        tables.copy(slot, new)
        self._pool.share(tables.used(new))
        # The child copies its last pages before it writes. The parent may fill up those that it
        # had room in: what it appends lies beyond the child's cells.
        tables.ready[new] = tables.computed[new]
        self._keys[new] = self._keys[slot]
        if self._ring is not None:
            self._ring.copy(slot, new)
        return new

    def truncate(self, slot: int, pos: int) -> int:
        """Drop the cells of tokens from `pos` on; the new `computed`, 0 if cells that were evicted
        would be part of the prefix."""
        tables = self._tables
        if pos >= tables.computed[slot]:
            return tables.computed[slot]
        if pos < tables.compacted_at[slot]:
            pos = 0
            self._pool.drop(tables.used(slot))
            tables.clear(slot)
            self._points.renew(slot)
        else:
            tables.length[slot] -= tables.computed[slot] - pos
            self._pool.drop(tables.shrink(slot, pages_for(tables.length[slot])))
            tables.computed[slot] = tables.ready[slot] = pos
        if self._ring is not None:
            self._ring.forget(slot, pos)
        return pos

    def release(self, slot: int) -> None:
        """Give everything back."""
        self._pool.drop(self._tables.used(slot))
        self._tables.clear(slot)
        self._ledger.release(slot)
        self._free_slots.append(slot)

    # What the executor sees

    def plan(self, rows: Seq[tuple[int, int, int]]) -> StepKV:
        """A step of rows (slot, start, count), in batch order, all of them reserved."""
        tables = self._tables
        for slot, start, count in rows:
            assert start == tables.computed[slot], f"slot {slot} goes on at {tables.computed[slot]}"
            assert start + count <= tables.ready[slot], f"slot {slot} has no room reserved"
        planned = Rows(*np.array(rows, dtype=np.int64).T.copy())
        return StepKV(self._parts, self._attend, planned, lambda: self._advance(planned))

    def _advance(self, rows: Rows) -> None:
        tables = self._tables
        tables.length[rows.slots] += rows.counts[:, None, None].astype(np.int32)
        for slot, start, count in zip(*(part.tolist() for part in rows), strict=True):
            tables.computed[slot] = start + count
            if start < tables.prompt_len[slot] and not tables.compacted_at[slot]:
                keys = self._keys[slot][: (start + count) // PAGE]
                self._prefix.insert(keys, tables.table[slot].reshape(-1, tables.width))

    def compress(self, slots: Seq[int]) -> None:
        """Compact those of the slots whose time has come."""
        if self._compactor is None:
            return
        for slot in slots:
            if self._tables.computed[slot] >= self._tables.point[slot]:
                start = time.perf_counter()
                self._evicted += self._compactor.compact(slot)
                self._points.renew(slot)
                self._compacting += time.perf_counter() - start

    # For people and tests

    def stats(self) -> KVStats:
        pool = self._pool
        return KVStats(
            pages=pool.pages,
            used_pages=pool.used,
            free_pages=pool.free,
            prefix_pages=pool.idle,
            page_bytes=self._page_bytes,
            peak_pages=pool.peak,
            side_bytes=self._slots * self._slot_bytes + pool.pages * self._page_side_bytes,
            used_side_bytes=(
                len(self._ledger.live) * self._slot_bytes + pool.used * self._page_side_bytes
            ),
            evicted_cells=self._evicted,
            compaction_seconds=self._compacting,
        )

    def computed(self, slot: int) -> int:
        """Tokens that the slot's cells stand for."""
        return self._tables.computed[slot]

    def held(self, slot: int) -> Ints:
        """Cells of each head, [L, H]."""
        return self._tables.length[slot].copy()

    def positions(self, slot: int, layer: int) -> list[Ints]:
        """Positions of the tokens whose cells each head of a layer still has, ascending."""
        table, length = self._tables.table[slot, layer], self._tables.length[slot, layer]
        pos = self._store.pos.cpu().numpy()
        return [pos[ids].reshape(-1)[:n] for ids, n in zip(table, length, strict=True)]

    def check(self) -> None:
        """Assert every invariant that ties tables, pool, prefixes and promises together."""
        tables, pool = self._tables, self._pool
        pool.check()
        self._prefix.check()
        self._ledger.check()
        assert self._ledger.live.isdisjoint(self._free_slots)
        refs = pool.kept.astype(np.int32)
        for slot in self._ledger.live:
            used = tables.used(slot)
            assert used.size == np.unique(used).size == tables.held_pages[slot]
            refs[used] += 1
            assert (tables.taken[slot] >= pages_for(tables.length[slot])).all()
            assert tables.ready[slot] >= tables.computed[slot]
            assert tables.compacted_at[slot] < tables.early[slot] <= tables.point[slot]
            assert tables.point[slot] <= tables.limit[slot]
            for layer in range(self.shape.layers):
                for pos in self.positions(slot, layer):
                    assert (np.diff(pos) > 0).all(), "positions ascend"
                    assert pos.size <= tables.computed[slot]
                    assert not pos.size or pos[-1] < tables.computed[slot]
        assert np.array_equal(refs, pool.refs), "references"
