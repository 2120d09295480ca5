"""A scripted model and a cache of counted pages, for tests of the scheduler alone.

The vocabulary is bytes: token t < 256 is the byte t, those above are special. `step` is the loop of
the engine; every step is checked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from engine.request import (
    Admission,
    Batch,
    Role,
    Row,
    RowOutput,
    SamplingParams,
    Sequence,
    StepOutput,
    TokenLogprob,
)
from engine.scheduler.controller import Controller
from engine.scheduler.reasoning import Markers
from engine.scheduler.scheduler import Scheduler, Settled
from engine.scheduler.stop import StopRules
from engine.scheduler.thoughts import Thoughts

EOS, OPEN, CLOSE = 256, 257, 258


def token_bytes(token: int) -> bytes:
    return bytes((token,)) if token < 256 else b""


def ids(text: str) -> list[int]:
    return list(text.encode())


def text_of(tokens: Iterable[int]) -> str:
    return b"".join(map(token_bytes, tokens)).decode()


Model = Callable[[Role, Seq[int], int], int]
"""(role, tokens, lineage) -> the next token."""


def noise(*what: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little")


def letters(role: Role, tokens: Seq[int], lineage: int) -> int:
    """Random text of few symbols, blank lines and ends among them; depends on every token."""
    draw = noise(role, tuple(tokens), lineage)
    choices: list[int] = [*b"aabbcc\n\n\n", EOS if draw % 7 == 0 else 97]
    return choices[draw % 10]


def logprob_of(role: Role, tokens: Seq[int], token: int) -> TokenLogprob:
    return TokenLogprob(token, -(1 + noise(role, tuple(tokens), token) % 1000) / 1000)


@dataclass
class FakeCapacity:
    """Pages of `page` cells; a page is whole, shared by forks until written (then copied).

    Keeps the tokens that its cells were made of, so that a cell that is no longer of its sequence's
    prefix is found out.
    """

    pages: int
    page: int = 4
    slots: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    refs: dict[int, int] = field(default_factory=dict)
    cut: int | None = None  # compaction points: rows never cross a multiple
    prefix: int = 0  # cells that an admission finds in the prefix cache
    born: int = 0
    waiting: set[int] = field(default_factory=set)  # slots that are being compacted

    @property
    def free(self) -> int:
        return self.pages - len(self.refs)

    def _need(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def refuses(self, tokens: int, kv_budget: int | str | None = None) -> str | None:
        need = self._need(tokens + 1)
        return None if need <= self.pages else f"{need} pages, the pool has {self.pages}"

    def _new(self) -> int:
        self.born += 1
        self.refs[self.born] = 1
        return self.born

    def admit(self, seq: Sequence, spare: int = 0) -> Admission | None:
        if self._need(len(seq.tokens) + 1) + spare > self.free:
            return None
        self.born += 1
        slot, hit = self.born, min(self.prefix, seq.prompt_len - 1)
        self.slots[slot] = seq.tokens[:hit]
        self.tables[slot] = [self._new() for _ in range(self._need(hit))]
        return Admission(slot, hit)

    def reserve(self, seq: Sequence, slot: int, tokens: int) -> int:
        cells, table = self.slots[slot], self.tables[slot]
        assert seq.tokens[: len(cells)] == cells, "stale cells"
        self.waiting.discard(slot)
        if self.cut is not None:
            tokens = min(tokens, self.cut - len(cells) % self.cut)
        if len(cells) % self.page and self.refs[table[-1]] > 1:  # copy on write
            if not self.free:
                return 0
            self.refs[table[-1]] -= 1
            table[-1] = self._new()
        room = (len(table) + self.free) * self.page - len(cells)
        tokens = min(tokens, room)
        while tokens > 0 and len(table) * self.page < len(cells) + tokens:
            table.append(self._new())
        return max(0, tokens)

    def busy(self, slot: int) -> bool:
        return slot in self.waiting

    def run(self, row: Row, slot: int) -> None:
        """What an executor does: the row's tokens become cells."""
        assert len(self.slots[slot]) == row.start
        self.slots[slot].extend(row.seq.tokens[row.start : row.start + row.count])
        assert len(self.slots[slot]) <= len(self.tables[slot]) * self.page, "no page reserved"

    def fork(self, slot: int, child: Sequence, spare: int = 0) -> int | None:
        if self.free <= spare:
            return None
        self.born += 1
        twin = self.born
        self.slots[twin] = self.slots[slot].copy()
        self.tables[twin] = self.tables[slot][: self._need(len(self.slots[slot]))]
        for page in self.tables[twin]:
            self.refs[page] += 1
        return twin

    def truncate(self, slot: int, pos: int) -> int:
        if self.cut is not None and pos < len(self.slots[slot]) // self.cut * self.cut:
            pos = 0
        del self.slots[slot][pos:]
        self._unref(self.tables[slot], self._need(pos))
        return len(self.slots[slot])

    def _unref(self, table: list[int], keep: int) -> None:
        for page in table[keep:]:
            self.refs[page] -= 1
            if not self.refs[page]:
                del self.refs[page]
        del table[keep:]

    def release(self, slot: int) -> None:
        del self.slots[slot]
        self.waiting.discard(slot)
        self._unref(self.tables.pop(slot), 0)

    def check(self) -> None:
        counted: dict[int, int] = {}
        for table in self.tables.values():
            for page in table:
                counted[page] = counted.get(page, 0) + 1
        assert counted == self.refs
        assert len(self.refs) <= self.pages


class Rig:
    """A scheduler with scripted models behind it."""

    def __init__(
        self,
        model: Model = letters,
        *,
        roles: Seq[Role] = ("main",),
        pages: int = 1000,
        controllers: tuple[Controller, ...] = (),
        markers: Markers | None = None,
        max_model_len: int = 10_000,
        max_num_seqs: int = 8,
        max_batched_tokens: int = 32,
        **capacity: Any,
    ) -> None:
        markers = markers or Markers()
        self.model = model
        self.capacity = {role: FakeCapacity(pages, **capacity) for role in roles}
        self.scheduler = Scheduler(
            self.capacity,
            stop=StopRules(
                eos_ids=(EOS,),
                max_model_len=max_model_len,
                token_bytes=token_bytes,
                markers=markers,
            ),
            controllers=controllers,
            thoughts=Thoughts(token_bytes, markers=markers),
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
        )
        self.max_batched_tokens = max_batched_tokens
        self.settled: list[Settled] = []
        self.text: dict[tuple[str, int], list[int]] = {}
        self.batches: list[Batch] = []

    def add(
        self, prompt: str | list[int], *, id: str = "r", priority: int = 0, **params: Any
    ) -> list[Sequence]:
        tokens = ids(prompt) if isinstance(prompt, str) else prompt
        settings = SamplingParams(**params)
        choices = [
            Sequence(id, len(tokens), tokens.copy(), settings, priority=priority)
            for _ in range(settings.n)
        ]
        self.scheduler.add(choices)
        self.check()
        return choices

    def run(self, batch: Batch) -> StepOutput:
        return StepOutput(tuple(self._row(batch, row) for row in batch.rows))

    def _row(self, batch: Batch, row: Row) -> RowOutput:
        seq, role = row.seq, batch.role
        self.capacity[role].run(row, seq.slots[role])
        given: tuple[TokenLogprob, ...] = ()
        if row.given is not None:
            last = min(row.start + row.count, len(seq.tokens) - 1)
            given = tuple(
                logprob_of(role, seq.tokens[:i], seq.tokens[i])
                for i in range(row.start + 1, last + 1)
            )
        if not row.samples:
            return RowOutput(given=given)
        token = self.model(role, seq.tokens, seq.lineage)
        logprob = logprob_of(role, seq.tokens, token) if seq.params.logprobs is not None else None
        entropy = float(token % 5) if batch.needs.entropy else None
        watch = tuple(-float(i) for i in batch.needs.watch_ids)
        return RowOutput(token, logprob, entropy, watch, given)

    def step(self) -> list[Batch]:
        batches = self.scheduler.schedule()
        assert len({batch.role for batch in batches}) == len(batches)
        self.check()
        for batch in batches:
            assert sum(row.count for row in batch.rows) <= self.max_batched_tokens
            self.scheduler.commit(batch, self.run(batch))
            self.check()
        self.batches.extend(batches)
        self.drain()
        return batches

    def drain(self) -> list[Settled]:
        new = self.scheduler.drain()
        for seq, start, end, _ in new:
            text = self.text.setdefault((seq.id, seq.index), [])
            assert not any(s.seq is seq and s.finish for s in self.settled), "text after the end"
            assert start == seq.prompt_len + len(text), "a token was left out or given twice"
            text.extend(seq.tokens[start:end])
        self.settled.extend(new)
        return new

    def finish(self, steps: int = 10_000) -> Rig:
        self.drain()
        for _ in range(steps):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "it doesn't end"
        for capacity in self.capacity.values():
            assert not capacity.slots, "slots leak"
            assert not capacity.refs, "pages leak"
        finished = [id(s.seq) for s in self.settled if s.finish]
        assert len(finished) == len(set(finished)), "a choice was reported twice"
        return self

    def check(self) -> None:
        self.scheduler.check()
        for capacity in self.capacity.values():
            capacity.check()
