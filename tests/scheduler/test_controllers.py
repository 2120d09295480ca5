"""The thinking budget, and two roles that take turns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Finish, Role, Sequence
from engine.scheduler.controller import Edit, TokenEvent, Watch
from engine.scheduler.controllers.alternate import Alternate
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.reasoning import Markers, ThinkingTracker
from tests.scheduler.fakes import CLOSE, EOS, OPEN, Model, Rig, noise, token_bytes
from tests.scheduler.scripted import Listener
from tests.scheduler.test_control import once, says

THINK = Markers(start=(OPEN,), end=(CLOSE,), closing=(*b"ok", CLOSE))


def budget_rig(
    model: Model, markers: Markers = THINK, prompt: Seq[int] = (112,), **params: Any
) -> Sequence:
    controller = ThinkingBudget(markers=markers, token_bytes=token_bytes)
    rig = Rig(model, controllers=(controller,), markers=markers)
    (seq,) = rig.add(list(prompt), **{"max_tokens": 30, **params})
    rig.finish()
    return seq


@pytest.mark.parametrize("budget", range(6))
def test_budget_is_exact_and_the_model_answers(budget: int) -> None:
    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        if len(seen) == 1:
            return OPEN
        if CLOSE not in seen:
            return 97
        return 98 if seen[-1] == CLOSE else EOS

    seq = budget_rig(model, thinking_token_budget=budget)
    assert seq.tokens[1:] == [OPEN, *[97] * budget, *b"ok", CLOSE, 98, EOS]
    tracker = ThinkingTracker(THINK, seq.tokens[:1])
    for token in seq.tokens[1:]:
        tracker.feed(token)
    assert tracker.thinking_tokens == budget


def test_a_model_that_closes_in_time_is_left_alone() -> None:
    script = [OPEN, 97, 97, CLOSE, 98]
    seq = budget_rig(says(*script), thinking_token_budget=3)
    assert seq.tokens[1:] == [*script, EOS]
    assert budget_rig(says(*script)).tokens[1:] == [*script, EOS], "no budget"


def test_budget_zero_where_the_prompt_opened_the_block() -> None:
    seq = budget_rig(lambda *_: 98, prompt=(112, OPEN), thinking_token_budget=0, max_tokens=5)
    assert seq.tokens[2:] == [*b"ok", CLOSE, 98, 98]


@given(
    budget=st.integers(0, 12),
    said=st.lists(st.sampled_from((OPEN, CLOSE, 97, 98)), min_size=1, max_size=60),
    opened=st.booleans(),
)
def test_no_output_thinks_past_its_budget(budget: int, said: list[int], opened: bool) -> None:
    """However often the model reopens its thinking, and whatever it closes itself."""
    prompt = [112, OPEN] if opened else [112]

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        at = len(seen) - len(prompt)
        return said[at] if at < len(said) else EOS

    seq = budget_rig(model, prompt=prompt, thinking_token_budget=budget, max_tokens=60)
    inside, counted, at = opened, 0, len(prompt)
    while at < len(seq.tokens):  # told from the text alone: a forced closing is "ok" and the marker
        token = seq.tokens[at]
        forced = inside and seq.tokens[at : at + 3] == [*b"ok", CLOSE]
        if forced:
            assert counted == budget
            inside, at = False, at + 3
            continue
        counted += inside and token not in (OPEN, CLOSE, *b"ok")
        if token == OPEN and inside:
            counted += 1  # a start marker inside a block is text of it
        inside = token == OPEN or (inside and token != CLOSE)
        assert counted <= budget
        at += 1


def test_a_closing_that_was_cut_short_comes_again() -> None:
    """Another watch's edit lands in the phrase and drops its rest."""

    def cuts(seq: Sequence, event: TokenEvent) -> Edit | None:
        cut = event.origin == "forced" and event.position == 4
        return Edit(append=(120,)) if cut else None

    budget = ThinkingBudget(markers=THINK, token_bytes=token_bytes)
    rig = Rig(
        lambda role, seen, lineage: OPEN if len(seen) == 1 else 97,
        controllers=(budget, Listener(answer=cuts)),
        markers=THINK,
    )
    (seq,) = rig.add("p", max_tokens=12, thinking_token_budget=2)
    rig.finish()
    assert seq.tokens[1:] == [OPEN, 97, 97, *b"o", 120, 97, *b"ok", CLOSE, 97, 97, 97]


def test_a_second_block_finds_the_budget_spent() -> None:
    script = [OPEN, 97, 97, *b"ok", CLOSE, 98, OPEN, *b"ok", CLOSE, 99]
    seq = budget_rig(says(*script), thinking_token_budget=2)
    assert seq.tokens[1:] == [*script, EOS]


def test_budget_without_markers_closes_once() -> None:
    closing = b"\n\nSo \\boxed{"
    plain = Markers(closing=tuple(closing))
    seq = budget_rig(lambda *_: 97, plain, thinking_token_budget=4, max_tokens=20)
    assert bytes(seq.tokens[1:]) == b"aaaa" + closing + b"aaaa"[: 16 - len(closing)]
    early = says(*b"x\\boxed{1} yes it is")
    assert budget_rig(early, plain, thinking_token_budget=9).tokens[-1] == EOS
    weak = Markers(closing=tuple(b"stop"))
    seq = budget_rig(lambda *_: 97, weak, thinking_token_budget=2, max_tokens=12)
    assert bytes(seq.tokens[1:]) == b"aastop" + b"a" * 6, "it doesn't loop"


def test_budget_needs_a_closing() -> None:
    with pytest.raises(ValueError, match=r"needs markers\.closing"):
        ThinkingBudget(markers=Markers(), token_bytes=token_bytes)


def test_stop_strings_sleep_while_thinking_through_a_budget() -> None:
    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        return OPEN if len(seen) == 1 else 97

    seq = budget_rig(model, thinking_token_budget=3, stop="aa")
    assert seq.tokens[1:] == [OPEN, 97, 97, 97, *b"ok", CLOSE, 97, 97]
    assert seq.finish == Finish("stop", "aa", 2)


def test_a_rewind_reaches_rules_budgets_and_turns() -> None:
    """A truncated trajectory is, from there on, one that had never gone the other way."""
    script: list[int] = [OPEN, *b"aa", CLOSE, *b"b\n\nc\n\nd"]

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        if lineage == 0:
            return script[len(seen) - 1]
        if CLOSE in seen:
            return EOS
        return 97 if len(seen) > 4 else OPEN

    rewound: list[int] = []

    class Rule:
        def mask(self, tokens: Seq[int]) -> None:
            return None

        def fork(self) -> Rule:
            return self

        def rewind(self, pos: int) -> None:
            rewound.append(pos)

    class Holds(Listener):
        def watch(self) -> Watch:
            watch = super().watch()
            watch.rules = lambda seq: (Rule(),)  # type: ignore[method-assign]
            watch.settled = lambda seq: 1  # type: ignore[method-assign]
            return watch

    back = Holds(answer=once(11, Edit(truncate=3, append=(120,))))
    budget = ThinkingBudget(markers=THINK, token_bytes=token_bytes)
    rig = Rig(
        model,
        roles=("main", "helper"),
        controllers=(back, Alternate(), budget),
        markers=THINK,
    )
    (seq,) = rig.add("p", max_tokens=30, thinking_token_budget=4)
    rig.finish()
    assert rewound == [3]
    assert seq.tokens[1:] == [OPEN, 97, 120, OPEN, 97, *b"ok", CLOSE, EOS]
    assert seq.thought_ends == [9]


def test_a_closing_that_was_taken_back_is_forced_again() -> None:
    back = Listener(answer=once(8, Edit(truncate=4)))
    budget = ThinkingBudget(markers=THINK, token_bytes=token_bytes)
    rig = Rig(
        lambda role, seen, lineage: OPEN if len(seen) == 1 else 97,
        controllers=(back, budget),
        markers=THINK,
    )
    (seq,) = rig.add("p", max_tokens=10, thinking_token_budget=3)
    while rig.scheduler.has_work():  # nothing is drained, so all may be taken back
        for batch in rig.scheduler.schedule():
            rig.scheduler.commit(batch, rig.run(batch))
        rig.check()
        if seq.finish:
            rig.finish()
    assert seq.tokens[1:] == [OPEN, 97, 97, 97, *b"ok", CLOSE, 97, 97, 97]


def prose(role: Role, seen: Seq[int], lineage: int) -> int:
    """Thoughts of a few letters; main writes small ones, the helper capital ones."""
    if seen[-1] == 10 and seen[-2] != 10:
        return 10
    draw = noise(role, tuple(seen), lineage) % 6
    return 10 if draw == 0 and seen[-1] != 10 else draw + (97 if role == "main" else 65)


def test_alternate_is_thought_by_thought_what_each_model_gives_alone() -> None:
    rig = Rig(prose, roles=("main", "helper"), controllers=(Alternate(),), max_batched_tokens=5)
    (seq,) = rig.add("pp", max_tokens=80)
    rig.finish()
    start, roles = 2, []
    for number, end in enumerate(seq.thought_ends):
        role = ("main", "helper")[number % 2]
        roles.append(role)
        for at in range(start, end):
            assert seq.tokens[at] == prose(role, seq.tokens[:at], 0)
        start = end
    assert len(roles) > 4
    assert rig.scheduler.stats().ran_tokens["helper"] > 20


def test_alternate_with_one_model_in_both_roles_is_that_model() -> None:
    def same(role: Role, seen: Seq[int], lineage: int) -> int:
        return prose("main", seen, lineage)

    tokens = []
    for controllers in ((), (Alternate(every=3),)):
        rig = Rig(same, roles=("main", "helper"), controllers=controllers)
        tokens.append(rig.add("pp", max_tokens=60)[0].tokens)
        rig.finish()
    assert tokens[0] == tokens[1]


def test_alternate_every_thought_and_bad_value() -> None:
    rig = Rig(prose, roles=("main", "helper"), controllers=(Alternate(every=1),))
    (seq,) = rig.add("pp", max_tokens=20)
    rig.finish()
    assert all(token < 97 for token in seq.tokens[2:])
    with pytest.raises(ValueError, match="every must be at least 1"):
        Alternate(every=0)
