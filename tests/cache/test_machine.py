"""Random work on tiny pools against dicts of lists; every invariant after every step."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.cache.paged import PagedCache
from engine.cache.policy import KVSpec
from engine.kernels.packed import PACK
from engine.request import Sequence
from tests.cache.harness import SHAPE, make_seq
from tests.cache.scripted import Ragged, Scripted, read_biases, read_labels, run_labelled, score

Cells = list[list[list[int]]]  # [layer][head] positions
MAX_LEN = 96
MAX_TOKENS = 40


@dataclass
class Model:
    """What one slot should hold."""

    seq: Sequence
    cells: Cells
    computed: int = 0
    compacted_at: int = 0
    base: list[int] = field(default_factory=lambda: [0] * SHAPE.layers)
    worn: dict[tuple[int, int, int], int] = field(default_factory=dict)  # compactions of a cell

    def __post_init__(self) -> None:
        self.find_thoughts()

    @property
    def asked(self) -> int | str | None:
        return self.seq.params.kv_budget

    def find_thoughts(self) -> None:
        """One ends with each token 3 that isn't the prompt's."""
        tokens, first = self.seq.tokens, self.seq.prompt_len
        self.seq.thought_ends[:] = [p + 1 for p in range(first, len(tokens)) if tokens[p] == 3]


def empty() -> Cells:
    return [[[] for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]


class CacheMachine(RuleBasedStateMachine):
    spec = KVSpec()
    pages = 30
    packed_pages = 0
    max_len = MAX_LEN
    stride = 1  # tokens that run together, times this
    asked: tuple[int | str | None, ...] = (None,)  # requests' own budgets

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(
            SHAPE,
            self.spec,
            pages=self.pages,
            packed_pages=self.packed_pages,
            slots=4,
            max_len=self.max_len,
            dtype=torch.float32,
            device=torch.device("cpu"),
            attend=lambda q, *_: q,
        )
        self.models: dict[int, Model] = {}

    # The model's own arithmetic

    def budgets(self, m: Model) -> list[int]:
        budget = self.spec.budget if m.asked is None else int(m.asked)
        return self.spec.allocation.layer_budgets(SHAPE, budget)

    def point(self, m: Model) -> int:
        policy = self.spec.policy
        if policy is None or m.asked == "full":
            return 10**9
        prompt = m.seq.prompt_len
        kept = prompt if policy.keeps_prompt else 0
        start = max(m.compacted_at, kept)
        pos = start + 1
        while not (
            (policy.streams_prompt or pos >= prompt)
            and any(
                policy.due(
                    max(base - kept, 0),
                    pos - start,
                    budget,
                    self.spec.window,
                    pos in m.seq.thought_ends,
                )
                for base, budget in zip(m.base, self.budgets(m), strict=True)
            )
        ):
            pos += 1
        return pos

    def compact(self, m: Model) -> None:
        policy, spec = self.spec.policy, self.spec
        assert isinstance(policy, Scripted)
        for layer, (heads, total) in enumerate(zip(m.cells, self.budgets(m), strict=True)):
            dummy = torch.zeros(1, SHAPE.kv_heads, 1)
            budgets = spec.allocation.head_budgets(dummy, dummy > 0, total)[0]
            start, end = policy.span(m.seq.prompt_len, m.compacted_at, m.computed)
            for head, cells in enumerate(heads):
                offered = [pos for pos in cells if start <= pos < end]
                count = min(int(budgets[head]), len(offered)) - policy.skip - policy.tail
                best = sorted(offered, key=lambda p: (score(p, layer, head), p), reverse=True)
                kept = sorted(best[: max(count, 0)])
                before = [pos for pos in cells if pos < start]
                heads[head] = before + kept + [pos for pos in cells if pos >= end]
                for pos in kept:
                    m.worn[layer, head, pos] = m.worn.get((layer, head, pos), 0) + 1
            m.base[layer] = -(-sum(map(len, heads)) // SHAPE.kv_heads)
        m.compacted_at = m.computed

    # Rules

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        length=st.integers(1, 50),
        spare=st.integers(0, 1),
        asks=st.integers(0, 9),
    )
    def admit(self, prompt: list[int], length: int, spare: int, asks: int) -> None:
        tokens = [prompt[i // 16 % len(prompt)] for i in range(length)]
        asked = self.asked[asks % len(self.asked)]
        seq = make_seq(tokens, max_tokens=MAX_TOKENS, kv_budget=asked)
        assert self.cache.refuses(length, asked) is None
        admitted = self.cache.admit(seq, spare)
        if admitted is None:
            assert self.models, "an empty cache takes anything that it doesn't refuse"
            return
        slot, computed = admitted
        assert slot not in self.models
        assert computed < length
        model = Model(seq, empty(), computed)
        for heads in model.cells:
            for cells in heads:
                cells.extend(range(computed))
        self.models[slot] = model

    @precondition(lambda self: self.models)
    @rule(data=st.data(), size=st.integers(1, 20), few=st.booleans())
    def run(self, data: st.DataObject, size: int, few: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.models)), min_size=1, unique=True))
        size = 1 if few else size * self.stride
        reserved = [(slot, self.reserve(slot, size)) for slot in chosen]
        granted = [(slot, count) for slot, count in reserved if count]
        if not granted:
            return
        models = self.models
        run_labelled(
            self.cache, [(models[s].seq.tokens, s, models[s].computed, n) for s, n in granted]
        )
        for slot, count in granted:
            self.append(models[slot], count)
        if data.draw(st.booleans()):  # the scheduler forks before the executor compacts
            self.fork(data.draw(st.sampled_from(list(models))), True, 0)
        self.cache.compress([slot for slot, _ in granted])
        for slot, _ in granted:
            if models[slot].computed == self.point(models[slot]):
                self.compact(models[slot])

    def reserve(self, slot: int, size: int) -> int:
        """Make sure that there are tokens to run, and reserve up to `size`."""
        m = self.models[slot]
        if len(m.seq.tokens) == m.computed and m.computed < self.max_len:
            m.seq.tokens.extend((m.computed + i) % 5 for i in range(size))
            m.find_thoughts()
        if m.computed == self.point(m):
            self.compact(m)  # a child of a fork just before its parent's compaction
        wanted = min(size, len(m.seq.tokens) - m.computed)
        granted = self.cache.reserve(m.seq, slot, wanted)
        room = min(wanted, self.point(m) - m.computed, self.max_len - m.computed)
        if self.packed_pages:
            room = min(room, PACK - (m.computed - m.compacted_at) % PACK)
        assert granted <= room
        if self.promise_holds(slot):
            assert granted == room
        return granted

    def append(self, m: Model, count: int) -> None:
        for heads in m.cells:
            for cells in heads:
                cells.extend(range(m.computed, m.computed + count))
        m.computed += count

    def promise_holds(self, slot: int) -> bool:
        """A bounded slot that isn't beyond its max_tokens always gets its pages."""
        m, policy = self.models[slot], self.spec.policy
        bounded = policy is not None and policy.bounded and m.asked != "full"
        return bounded and len(m.seq.tokens) <= m.seq.prompt_len + MAX_TOKENS

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.models)))
        m = self.models[slot]
        pos = data.draw(st.integers(0, len(m.seq.tokens)))
        del m.seq.tokens[max(pos, m.seq.prompt_len) :]
        m.seq.tokens.extend([4] * data.draw(st.integers(0, 3)))
        m.find_thoughts()
        got = self.cache.truncate(slot, pos)
        if pos < m.compacted_at or (self.packed_pages and got == 0):  # no room for plain cells
            m.cells, m.computed, m.compacted_at = empty(), 0, 0
            m.base, m.worn = [0] * SHAPE.layers, {}
        elif pos < m.computed:
            for heads in m.cells:
                for cells in heads:
                    del cells[len(cells) - (m.computed - pos) :]
            m.computed = pos
        assert got == m.computed

    @precondition(lambda self: self.models)
    @rule(data=st.data(), branch=st.booleans(), spare=st.integers(0, 1))
    def fork_any(self, data: st.DataObject, branch: bool, spare: int) -> None:
        self.fork(data.draw(st.sampled_from(list(self.models))), branch, spare)

    def fork(self, slot: int, branch: bool, spare: int) -> None:
        m = self.models[slot]
        child = make_seq(m.seq.tokens, m.seq.prompt_len, MAX_TOKENS, kv_budget=m.asked)
        child.parent = m.seq if branch else None
        new = self.cache.fork(slot, child, 0 if branch else spare)
        if new is not None:
            cells = [[list(cells) for cells in heads] for heads in m.cells]
            kept = (m.computed, m.compacted_at, [*m.base], {**m.worn})
            self.models[new] = Model(child, cells, *kept)

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.models)))
        del self.models[slot]
        self.cache.release(slot)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        for slot, m in self.models.items():
            assert self.cache.computed(slot) == m.computed
            expected = [[[(m.seq.tokens[p], p) for p in c] for c in heads] for heads in m.cells]
            assert read_labels(self.cache, slot) == expected
            if self.spec.bias:
                worn = [
                    [[m.worn.get((n, h, p), 0) for p in cells] for h, cells in enumerate(heads)]
                    for n, heads in enumerate(m.cells)
                ]
                assert read_biases(self.cache, slot) == worn

    def teardown(self) -> None:
        for slot in list(self.models):
            self.cache.release(slot)
        self.cache.check()
        stats = self.cache.stats()
        assert stats.used_pages == 0
        assert stats.free_pages + stats.prefix_pages == self.pages
        assert stats.free_packed_pages + stats.prefix_packed_pages == self.packed_pages
        assert stats.used_bytes == 0


class Windows(Scripted):
    """Compacts each window once."""

    def peak(self, prompt: int, total: int, budget: int, window: int) -> int:
        return total

    def due(
        self, held: int, fresh: int, budget: int, window: int, thought_ended: bool = False
    ) -> bool:
        return fresh >= window

    def span(self, prompt: int, last: int, now: int) -> tuple[int, int]:
        return max(prompt, last - self.tail), now - self.tail


class Bounded(CacheMachine):
    spec = KVSpec(policy=Scripted(), budget_tokens=20, window=9, allocation=Ragged())
    pages = 66
    asked = (None, 12, 16)


class Streaming(CacheMachine):
    spec = KVSpec(policy=Scripted(skip=3, tail=2, streams_prompt=True), budget_tokens=20, window=13)
    pages = 50


class Mixed(CacheMachine):
    """Compactions at thoughts, biases, and requests that keep the full cache."""

    spec = KVSpec(policy=Scripted(bias=True, early=6), budget_tokens=20, window=9, allow_full=True)
    pages = 50
    asked = (None, "full", 14)


class Growing(CacheMachine):
    """The prompt stays, and so does what was compacted once."""

    spec = KVSpec(
        policy=Windows(tail=3, keeps_prompt=True, bounded=False, bias=True),
        budget_tokens=8,
        window=13,
    )
    pages = 40


class Packed(CacheMachine):
    spec = KVSpec(format="int8", tail_tokens=20)
    pages, packed_pages = 150, 30
    max_len, stride = 300, 4


class PackedBounded(CacheMachine):
    """Compactions that take cells out of packed pages, and give others biases."""

    spec = KVSpec(
        format="int8",
        tail_tokens=7,
        policy=Scripted(bias=True, early=6),
        budget_tokens=120,
        window=40,
        allow_full=True,
        allocation=Ragged(by=30),
    )
    pages, packed_pages = 160, 120
    max_len, stride = 300, 4
    asked = (None, "full", 100)


@pytest.mark.parametrize(
    "machine", [CacheMachine, Bounded, Streaming, Mixed, Growing, Packed, PackedBounded]
)
def test_machine(machine: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
