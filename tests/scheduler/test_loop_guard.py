"""The loop guard, against what the definition of a loop says of the tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Finish, Role, Sequence
from engine.scheduler.controller import Edit, Language, Watch
from engine.scheduler.controllers.loop_guard import LoopGuard
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.detect import LoopSpec, find_loop
from engine.scheduler.reasoning import Markers, ThinkingTracker
from tests.scheduler.fakes import CLOSE, EOS, OPEN, Model, Rig, token_bytes
from tests.scheduler.scripted import Listener
from tests.scheduler.test_control import once, says

CLOSING = (*b"ok", CLOSE)
THINK = Markers(start=(OPEN,), end=(CLOSE,), closing=CLOSING)
SMALL = LoopSpec(max_period=4, least_tokens=6, every=4)


def guard(markers: Markers = THINK, **fields: Any) -> LoopGuard:
    return LoopGuard(**fields).bind(Language(markers, token_bytes))


def run(model: Model, *, markers: Markers = THINK, max_tokens: int = 60, **fields: Any) -> Sequence:
    rig = Rig(model, controllers=(guard(markers, **fields),), markers=markers)
    (seq,) = rig.add("p", max_tokens=max_tokens)
    rig.finish()
    assert rig.scheduler.stats().edits.get("LoopGuard", 0) >= seq.edits.get("LoopGuard", 0)
    return seq


def loops_until_closed(period: int, first: int = 0) -> Model:
    """Thinks `first` tokens, then a cycle; once closed it answers "b"."""

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        if len(seen) == 1:
            return OPEN
        if CLOSE in seen:
            return 98 if seen[-1] == CLOSE else EOS
        at = len(seen) - 2 - first
        return 300 + at % period if at >= 0 else 600 + at

    return model


@pytest.mark.parametrize("period", [1, 2, 16, 17, 100, 256])
@pytest.mark.parametrize("first", [0, 5])
def test_a_looping_chain_is_closed_and_answered(period: int, first: int) -> None:
    seq = run(loops_until_closed(period, first), max_tokens=1000)
    thought = seq.tokens[2 : seq.tokens.index(CLOSE) - 2]
    assert seq.tokens[-5:] == [*CLOSING, 98, EOS]
    assert seq.edits == {"LoopGuard": 1}
    loop = find_loop([OPEN, *thought])
    assert loop is not None
    assert loop.period == period
    # seen at the first check behind the point from which it was one
    whole = max(48, 3 * period) + first
    assert whole <= len(thought) < whole + 16


def test_a_period_above_256_is_none() -> None:
    seq = run(loops_until_closed(257), max_tokens=1200)
    assert seq.finish == Finish("length")
    assert seq.edits == {}


def test_two_copies_are_none_nor_is_a_loop_that_was_left() -> None:
    twice = [OPEN, *range(60), *range(60), CLOSE, 98]
    assert run(says(*twice), max_tokens=200).tokens[1:] == [*twice, EOS]
    left = [OPEN, *([7] * 50), 9, CLOSE, 98]  # 51 tokens; checks are at 48 and 64
    assert run(says(*left), max_tokens=200).tokens[1:] != left, "48 of them are a loop at a check"
    left = [OPEN, 1, 2, *([7] * 47), 9, CLOSE, 98]
    assert run(says(*left), max_tokens=200).tokens[1:] == [*left, EOS]


@given(st.lists(st.sampled_from((OPEN, CLOSE, 97, 98)), max_size=50))
def test_it_closes_where_the_definition_says(said: list[int]) -> None:
    """An oracle that knows no increments: every fourth token, look at all of the output."""

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        heard = list(seen[1:])
        at = len(heard) - 3 * closings(heard)
        return said[at] if at < len(said) else EOS

    def closings(tokens: Seq[int]) -> int:
        return sum(
            list(tokens[i : i + 3]) == [*CLOSING] for i in range(len(tokens))
        )  # nobody says "ok"

    expected: list[int] = []
    for token in [*said, EOS]:
        expected.append(token)
        chain = ThinkingTracker(THINK, [112])
        for each in expected:
            chain.feed(each)
        looks = token != EOS and len(expected) % 4 == 0 and chain.thinking
        if looks and find_loop(expected, SMALL):
            expected += CLOSING
    assert run(model, spec=SMALL, max_tokens=500).tokens[1:] == expected


def test_a_block_that_is_opened_again_is_guarded_again() -> None:
    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        if len(seen) == 1 or (seen[-1] == CLOSE and seen.count(CLOSE) < 3):
            return OPEN
        return 97 if seen.count(OPEN) > seen.count(CLOSE) else EOS

    seq = run(model, spec=SMALL)
    assert seq.edits == {"LoopGuard": 3}
    assert seq.tokens[-1] == EOS
    assert len(seq.tokens) < 45


def test_an_answer_that_loops_is_left_alone_unless_asked() -> None:
    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        return 97

    assert run(model).finish == Finish("length")
    seq = run(model, answers=True, max_tokens=100)
    assert seq.finish == Finish("stop", "repetition")
    assert seq.output_len == 48


def test_a_model_without_markers() -> None:
    plain = Markers(closing=tuple(b"So \\boxed{"))

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        return 97 if seen[-1] != ord("{") else EOS

    assert run(model, markers=plain).finish == Finish("length")
    seq = run(model, markers=plain, aloud=True)
    assert bytes(seq.tokens[1:-1]) == b"a" * 48 + b"So \\boxed{"
    assert run(model, markers=plain, answers=True).finish == Finish("stop", "repetition")


def test_a_closing_phrase_under_way_is_not_interrupted() -> None:
    """The phrase itself repeats, so that the check falls into it."""
    markers = Markers(start=(OPEN,), end=(CLOSE,), closing=(*[97] * 9, CLOSE))
    budget = ThinkingBudget(markers=markers, token_bytes=token_bytes)
    rig = Rig(
        lambda role, seen, lineage: OPEN if len(seen) == 1 else EOS if CLOSE in seen else 97,
        controllers=(budget, guard(markers, spec=SMALL)),
        markers=markers,
    )
    (seq,) = rig.add("p", max_tokens=40, thinking_token_budget=5)
    rig.finish()
    assert seq.tokens[1:] == [OPEN, *[97] * 5, *[97] * 9, CLOSE, EOS]
    assert seq.edits == {"ThinkingBudget": 1}


def test_a_rewind_is_as_if_it_had_never_gone_there() -> None:
    class Holds(Listener):
        def watch(self) -> Watch:
            watch = super().watch()
            watch.settled = lambda seq: 1  # type: ignore[method-assign]
            return watch

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        return OPEN if len(seen) == 1 else 97 if lineage == 0 else len(seen) % 90

    back = Holds(answer=once(7, Edit(truncate=4)))
    rig = Rig(model, controllers=(back, guard(spec=SMALL)), markers=THINK)
    (seq,) = rig.add("p", max_tokens=20)
    rig.finish()
    assert seq.tokens[1:] == [OPEN, 97, 97, *range(4, 21)]


def test_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"needs markers\.closing"):
        guard(Markers())
    with pytest.raises(ValueError, match="isn't bound"):
        LoopGuard().watch()
