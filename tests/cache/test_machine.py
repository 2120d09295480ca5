"""Random work on tiny pools against dicts of lists; every invariant after every step."""

from dataclasses import dataclass
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
from engine.request import Sequence
from tests.cache.harness import SHAPE, make_seq
from tests.cache.scripted import Ragged, Scripted, read_labels, run_labelled, score

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
    base: int = 0


def empty() -> Cells:
    return [[[] for _ in range(SHAPE.kv_heads)] for _ in range(SHAPE.layers)]


class CacheMachine(RuleBasedStateMachine):
    spec = KVSpec()
    pages = 30

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache(
            SHAPE,
            self.spec,
            pages=self.pages,
            slots=4,
            max_len=MAX_LEN,
            dtype=torch.float32,
            device=torch.device("cpu"),
            attend=lambda q, *_: q,
        )
        self.models: dict[int, Model] = {}

    # The model's own arithmetic

    def point(self, m: Model) -> int:
        policy = self.spec.policy
        if policy is None:
            return 10**9
        pos = m.compacted_at + 1
        while not (
            (policy.streams_prompt or pos >= m.seq.prompt_len)
            and policy.due(m.base, pos - m.compacted_at, self.spec.budget, self.spec.window)
        ):
            pos += 1
        return pos

    def compact(self, m: Model) -> None:
        policy, spec = self.spec.policy, self.spec
        assert isinstance(policy, Scripted)
        layer_budgets = spec.allocation.layer_budgets(SHAPE, spec.budget)
        for layer, heads in enumerate(m.cells):
            dummy = torch.zeros(1, SHAPE.kv_heads, 1)
            budgets = spec.allocation.head_budgets(dummy, dummy > 0, layer_budgets[layer])[0]
            longest = max(map(len, heads))
            start, end = policy.span(longest, spec.budget, spec.window)
            for head, cells in enumerate(heads):
                offered = cells[start:end]
                count = min(int(budgets[head]), len(offered)) - policy.skip - policy.tail
                best = sorted(offered, key=lambda p: (score(p, layer, head), p), reverse=True)
                kept = sorted(best[: max(count, 0)])
                heads[head] = cells[:start] + kept + cells[end:]
        held = sum(len(cells) for heads in m.cells for cells in heads)
        m.base = -(-held // (SHAPE.layers * SHAPE.kv_heads))
        m.compacted_at = m.computed

    # Rules

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=3),
        length=st.integers(1, 50),
        spare=st.integers(0, 1),
    )
    def admit(self, prompt: list[int], length: int, spare: int) -> None:
        tokens = [prompt[i // 16 % len(prompt)] for i in range(length)]
        seq = make_seq(tokens, max_tokens=MAX_TOKENS)
        assert self.cache.refuses(length) is None
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
        reserved = [(slot, self.reserve(slot, 1 if few else size)) for slot in chosen]
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
        """Make sure that there's a token to run, and reserve up to `size`."""
        m = self.models[slot]
        if len(m.seq.tokens) == m.computed and m.computed < MAX_LEN:
            m.seq.tokens.append(m.computed % 5)
        if m.computed == self.point(m):
            self.compact(m)  # a child of a fork just before its parent's compaction
        wanted = min(size, len(m.seq.tokens) - m.computed)
        granted = self.cache.reserve(m.seq, slot, wanted)
        room = min(wanted, self.point(m) - m.computed, MAX_LEN - m.computed)
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
        m = self.models[slot]
        return self.spec.policy is not None and len(m.seq.tokens) <= m.seq.prompt_len + MAX_TOKENS

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.models)))
        m = self.models[slot]
        pos = data.draw(st.integers(0, len(m.seq.tokens)))
        del m.seq.tokens[max(pos, m.seq.prompt_len) :]
        m.seq.tokens.extend([4] * data.draw(st.integers(0, 3)))
        got = self.cache.truncate(slot, pos)
        if pos < m.compacted_at:
            m.cells, m.computed, m.compacted_at, m.base = empty(), 0, 0, 0
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
        child = make_seq(m.seq.tokens, m.seq.prompt_len, MAX_TOKENS)
        child.parent = m.seq if branch else None
        new = self.cache.fork(slot, child, 0 if branch else spare)
        if new is not None:
            cells = [[list(cells) for cells in heads] for heads in m.cells]
            self.models[new] = Model(child, cells, m.computed, m.compacted_at, m.base)

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

    def teardown(self) -> None:
        for slot in list(self.models):
            self.cache.release(slot)
        self.cache.check()
        stats = self.cache.stats()
        assert stats.used_pages == 0
        assert stats.free_pages + stats.prefix_pages == self.pages


class Bounded(CacheMachine):
    spec = KVSpec(policy=Scripted(), budget_tokens=20, window=9, allocation=Ragged())
    pages = 66


class Streaming(CacheMachine):
    spec = KVSpec(policy=Scripted(skip=3, tail=2, streams_prompt=True), budget_tokens=20, window=13)
    pages = 50


@pytest.mark.parametrize("machine", [CacheMachine, Bounded, Streaming])
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
