"""The paged cache of one model: append, truncate, fork, release, and compaction.

A slot is a sequence's row in the tables; its cells are a view of a prefix of that sequence. The
scheduler sees it as a `Capacity` (it admits, reserves, forks, truncates, releases); the executor
plans a step, lets every layer attend, and finishes it. Pages move only in here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from engine.cache.admission import Ledger
from engine.cache.budgets import Budgets, Need, PackedNeed, PlainNeed, TailNeed
from engine.cache.check import check_packed, check_plain
from engine.cache.compact import Compactor
from engine.cache.compactions import Compactions
from engine.cache.cut import cut_off
from engine.cache.format import CellStore
from engine.cache.groups import Groups
from engine.cache.hits import adopt, as_computed, find, remember, remember_packed
from engine.cache.packed_store import PackedStore
from engine.cache.pages import Ints, Meter, PagePool
from engine.cache.parts import PackedParts, Parts
from engine.cache.points import Points
from engine.cache.policy import KVSpec
from engine.cache.prefix import PrefixCache, chain_keys
from engine.cache.repack import pack
from engine.cache.ring import QueryRing
from engine.cache.room import make_room, pack_room
from engine.cache.sizes import KVStats, Sizes, SlotUse
from engine.cache.step import Rows, StepKV
from engine.cache.tables import Tables, Whose
from engine.cache.view import KVShape
from engine.kernels.attention import Attend
from engine.request import Admission, Sequence


class PagedCache:
    """`pages` plain pages shared by all layers and heads (and `packed_pages` of a packed format's),
    `slots` sequences of at most `max_len` tokens.

    `attend` is the attention op; `dtype` the model's.
    """

    def __init__(
        self,
        shape: KVShape,
        spec: KVSpec,
        *,
        pages: int,
        packed_pages: int = 0,
        slots: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        attend: Attend,
    ) -> None:
        self.shape = shape
        self.max_len = max_len
        self._format = form = spec.cells(dtype)
        self._slots = slots
        self._attend = attend
        self._spec = spec
        self._sizes = Sizes(shape, spec, dtype)
        self._slot_bytes = self._sizes.slot_bytes(max_len)
        self._meter = Meter()
        self._tables = Tables(shape, slots, self._sizes.plain_cells(max_len))
        self._budgets = budgets = Budgets(shape, spec)
        self._points = Points(spec, budgets, self._tables)
        self._pool = PagePool(pages, self._sizes.page_bytes, self._meter)
        self._prefix = PrefixCache(self._pool)
        store = CellStore(pages, shape.head_dim, form.dtype, device, spec.bias)
        packed: PackedParts | None = None
        need: Need = PlainNeed(budgets, shape.kv_heads, shares=spec.policy is None)
        if form.bits:
            need = TailNeed(budgets, shape.kv_heads, form)
            pool = PagePool(packed_pages, self._sizes.packed_page_bytes, self._meter)
            packed = PackedParts(
                Groups(shape, slots, max_len, form.tail),
                PackedStore(packed_pages, shape.head_dim, form.bits, device, spec.bias),
                pool,
                PrefixCache(pool),
            )
        self._ledger = self._make_ledger(need, self._pool, self._tables.held_pages)
        self._ledgers = [self._ledger]
        if packed is not None:
            needs = PackedNeed(budgets, shape.kv_heads, form, spec.window, spec.policy is None)
            self._ledgers.append(self._make_ledger(needs, packed.pool, packed.groups.held_pages))
        self._free_slots = list(range(slots))[::-1]
        self._keys: list[list[bytes]] = [[] for _ in range(slots)]  # of the prompts' full pages
        # the last to ask, if it is still there, and its keys
        self._asked: tuple[Callable[[], Sequence | None], list[bytes]] = (lambda: None, [])
        self._compactions: Compactions | None = None
        self._queries = spec.queries
        ring = QueryRing(shape, self._queries, slots, dtype, device) if self._queries else None
        self._ring = ring
        self._packed = packed
        self._parts = Parts(self._tables, store, self._pool, self._prefix, ring, packed)
        self._store = store
        if spec.policy is not None:
            compactor = Compactor(spec.policy, spec, budgets, self._parts)
            self._compactions = Compactions(compactor, self._points.renew)

    def _make_ledger(self, need: Need, pool: PagePool, held: list[int]) -> Ledger:
        heads = self.shape.layers * self.shape.kv_heads
        return Ledger(need, heads, pool, held, self._tables.budget)

    # Capacity: what the scheduler sees

    def refuses(self, tokens: int, kv_budget: int | str | None = None) -> str | None:
        """Why a prompt of so many tokens and one more can never be held, at the budget that the
        request asks for; None if it can."""
        if tokens + 1 > self.max_len:
            return f"{tokens} prompt tokens and one more exceed max_model_len={self.max_len}"
        sizes, budget = self._sizes, self._spec.granted(kv_budget)
        plain = sizes.page_bytes + sizes.page_side_bytes
        packed = sizes.packed_page_bytes + sizes.packed_page_side_bytes
        for ledger, page, kind in zip(
            self._ledgers, (plain, packed), ("", "packed "), strict=False
        ):
            need, there = ledger.least(tokens, budget), ledger.pages
            if need > there:
                return (
                    f"{tokens} prompt tokens and one more need {need} {kind}pages of KV cache"
                    f" ({need * page} bytes); it has {there} ({there * page} bytes)"
                )
        return None

    def admit(self, seq: Sequence, spare: int = 0) -> Admission | None:
        """A slot for a sequence, with room for `spare` children besides; None: not now."""
        if not self._free_slots:
            return None
        slot, tables = self._free_slots[-1], self._tables
        self._clear(slot)
        tables.prompt_len[slot] = seq.prompt_len
        budget = tables.budget[slot] = self._spec.granted(seq.params.kv_budget)
        self._points.renew(slot)
        keys = self._keys_of(seq)
        # At least one prompt token runs, and every token whose query the policy remembers.
        most = min(seq.prompt_len - 1, tables.early[slot] - max(self._queries, 1))
        hit = find(self._parts, keys, 0 if seq.params.prompt_logprobs is not None else most)
        shared = hit.shared(self._parts)
        if not self._each(
            slot,
            lambda ledger, at: ledger.admit(
                slot, ledger.promise(seq, budget, self.max_len), spare, shared[at]
            ),
        ):
            return None
        self._free_slots.pop()
        self._keys[slot] = keys
        if self._ring is not None:
            self._ring.forget(slot, 0)
        if hit.tokens:
            adopt(self._parts, slot, keys, hit)
        return Admission(slot, tables.computed[slot])

    def _each(self, slot: int, ask: Callable[[Ledger, int], bool]) -> bool:
        """Whether every ledger promises the slot its room; otherwise none has."""
        for at, ledger in enumerate(self._ledgers):
            if not ask(ledger, at):
                for other in self._ledgers[:at]:
                    other.release(slot)
                return False
        return True

    def _clear(self, slot: int) -> None:
        self._tables.clear(slot)
        if self._packed is not None:
            self._packed.groups.clear(slot)

    def _keys_of(self, seq: Sequence) -> list[bytes]:
        """Of the prompt's full pages; whoever waits first in line is asked for at every step."""
        if self._asked[0]() is not seq:
            self._asked = weakref.ref(seq), chain_keys(seq.tokens[: seq.prompt_len])
        return self._asked[1]

    def reserve(self, seq: Sequence, slot: int, tokens: int) -> int:
        """How many of the next tokens may run now. They have pages then, of the slot's own."""
        tables = self._tables
        # Nothing may follow before the slot's compaction is done: it is still under way, or nobody
        # began it, as the slot was forked at its point, or adopted in the step that reached it.
        self.compress([slot])
        tables.whose[slot] = Whose(seq.seed, seq.lineage, seq.thought_ends)
        self._points.look(slot)
        start = tables.computed[slot]
        stop = self.max_len if self.failure(slot) else tables.point[slot]
        if self._packed is not None:
            stop = min(stop, self._packed.groups.at[slot])
        end = min(start + tokens, stop, self.max_len)
        if end > tables.ready[slot]:
            end = make_room(self._parts, self._ledger, slot, end)
        if end == stop and self._packed is not None:
            end = pack_room(self._packed, self._ledgers[1], tables, slot, end)
        return end - start

    def busy(self, slot: int) -> bool:
        """Whether the slot waits for its compaction, so that it had better run later."""
        return self._compactions is not None and self._compactions.waits(slot)

    def fork(self, slot: int, child: Sequence, spare: int = 0) -> int | None:
        """A slot for the child, sharing every page; None if there's no room for it."""
        branch = child.parent is not None
        if not self._free_slots:
            return None
        new, tables = self._free_slots[-1], self._tables
        if self._compactions is not None and self._compactions.begun(slot):
            self._compactions.work([slot])
        if not self._each(new, lambda ledger, _: ledger.fork(slot, new, branch, spare)):
            return None
        self._free_slots.pop()
        tables.copy(slot, new)
        self._pool.share(tables.used(new))
        if self._packed is not None:
            self._packed.groups.copy(slot, new)
            self._packed.pool.share(self._packed.groups.used(new))
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
        kept = (
            (self._compactions is None or not self._compactions.begun(slot))
            and pos >= tables.compacted_at[slot]
            and cut_off(self._parts, self._ledger, slot, tables.computed[slot] - pos)
        )
        if self._compactions is not None:
            self._compactions.forget(slot)
        if not kept:
            pos = 0
            self._drop(slot)
            self._points.renew(slot)
        else:
            tables.computed[slot] = tables.ready[slot] = pos
            if self._packed is not None:
                self._packed.groups.renew(slot, tables.compacted_at[slot], pos)
            if not tables.compacted_at[slot] and not as_computed(self._parts, slot):
                self._keys[slot] = []
        if self._ring is not None:
            self._ring.forget(slot, pos)
        return pos

    def release(self, slot: int) -> None:
        """Give everything back."""
        self._drop(slot)
        for ledger in self._ledgers:
            ledger.release(slot)
        self._free_slots.append(slot)

    def _drop(self, slot: int) -> None:
        self._pool.drop(self._tables.used(slot))
        if self._packed is not None:
            self._packed.pool.drop(self._packed.groups.used(slot))
        if self._compactions is not None:
            self._compactions.forget(slot)
        self._clear(slot)

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
                remember(self._parts, slot, self._keys[slot])

    def compress(self, slots: Seq[int], seconds: float | None = None) -> None:
        """Compact those of the slots whose time has come, and pack the cells of others.

        With `seconds`, slots that wait already come first, and what would make the call last longer
        waits for the next one, unless no other slot is there to be held up.
        """
        tables, compactions = self._tables, self._compactions
        for slot in slots:
            if compactions is not None and tables.computed[slot] >= tables.point[slot]:
                compactions.add(slot)
            elif self._packed is not None and tables.computed[slot] >= self._packed.groups.at[slot]:
                self._pack(slot, self._packed)
        if compactions is not None and seconds is None:
            compactions.work(slots)
        elif compactions is not None:
            compactions.work(seconds=seconds if len(self._ledger.live) > 1 else None)

    def failure(self, slot: int) -> str | None:
        """Why the slot's cells are good for nothing, if a compaction failed."""
        return None if self._compactions is None else self._compactions.failure(slot)

    def _pack(self, slot: int, packed: PackedParts) -> None:
        tables = self._tables
        pack(self._parts, packed, slot)
        packed.groups.renew(slot, tables.compacted_at[slot], tables.computed[slot])
        tables.ready[slot] = tables.computed[slot]
        if not tables.compacted_at[slot]:
            remember_packed(self._parts, slot, self._keys[slot])

    # For people and tests

    def stats(self) -> KVStats:
        pool, sizes, done = self._pool, self._sizes, self._compactions
        other = PagePool(0) if self._packed is None else self._packed.pool
        slot_bytes = self._slot_bytes
        side = sizes.page_side_bytes, sizes.packed_page_side_bytes
        return KVStats(
            pages=pool.pages,
            used_pages=pool.used,
            free_pages=pool.free,
            prefix_pages=pool.idle,
            page_bytes=sizes.page_bytes,
            peak_pages=pool.peak,
            packed_pages=other.pages,
            used_packed_pages=other.used,
            free_packed_pages=other.free,
            prefix_packed_pages=other.idle,
            packed_page_bytes=sizes.packed_page_bytes,
            used_bytes=self._meter.used,
            peak_bytes=self._meter.peak,
            side_bytes=self._slots * slot_bytes + pool.pages * side[0] + other.pages * side[1],
            used_side_bytes=(
                len(self._ledger.live) * slot_bytes + pool.used * side[0] + other.used * side[1]
            ),
            evicted_cells=0 if done is None else done.evicted,
            compaction_seconds=0.0 if done is None else done.seconds,
        )

    def computed(self, slot: int) -> int:
        """Tokens that the slot's cells stand for."""
        return self._tables.computed[slot]

    def held(self, slot: int) -> Ints:
        """Cells of each head, [L, H]."""
        return self._parts.held(slot)

    def use(self, slot: int) -> SlotUse:
        """What the slot holds now, shared pages too."""
        plain = self._tables.length[slot].copy()
        packed, pages = np.zeros_like(plain), 0
        if self._packed is not None:
            packed = self._packed.groups.cells(slot)
            pages = self._packed.groups.held_pages[slot]
        return SlotUse(plain, packed, pages, self._slot_bytes, self._sizes)

    def positions(self, slot: int, layer: int) -> list[Ints]:
        """Positions of the tokens whose cells each head of a layer still has, ascending."""
        pos = self._parts.read_pos(self._parts.addresses(slot, layer)[0])
        return [own[:n] for own, n in zip(pos, self.held(slot)[layer], strict=True)]

    def check(self) -> None:
        """Assert every invariant that ties tables, pools, prefixes and promises together."""
        assert self._ledger.live.isdisjoint(self._free_slots)
        for ledger in self._ledgers:
            assert ledger.live == self._ledger.live
            ledger.check()
        check_plain(self._parts, self._ledger.live)
        if self._packed is not None:
            check_packed(self._parts, self._packed, self._ledger.live)
        for slot in self._ledger.live:
            for layer in range(self.shape.layers):
                for pos in self.positions(slot, layer):
                    assert (np.diff(pos) > 0).all(), "positions ascend"
                    assert pos.size <= self._tables.computed[slot]
                    assert not pos.size or pos[-1] < self._tables.computed[slot]
