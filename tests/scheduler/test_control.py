"""Edits, events and errors; the thinking budget; two roles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from engine.request import Finish, Role, Sequence
from engine.scheduler.controller import Adopt, Branch, Decision, Edit, TokenEvent, Watch
from engine.scheduler.controllers.alternate import Alternate
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.reasoning import Markers, ThinkingTracker
from engine.scheduler.track import REWOUND, lineage_of
from tests.scheduler.fakes import CLOSE, EOS, OPEN, Model, Rig, letters, noise, token_bytes
from tests.scheduler.scripted import Listener, Rewinder
from tests.scheduler.test_scheduler import endless

THINK = Markers(start=(OPEN,), end=(CLOSE,), closing=(*b"ok", CLOSE))


def says(*tokens: int) -> Model:
    """A model that says this after a one-token prompt, then EOS for ever."""
    script = [*tokens]

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        at = len(seen) - 1
        return script[at] if at < len(script) else EOS

    return model


def once(at: int, decision: Decision) -> Callable[[Sequence, TokenEvent], Decision]:
    """Decide when the sampled token at position `at` is heard for the first time."""
    done: list[int] = []

    def answer(seq: Sequence, event: TokenEvent) -> Decision:
        if event.position != at or event.origin != "sampled" or done:
            return None
        done.append(at)
        return decision

    return answer


def test_edit_truncates_appends_and_goes_on() -> None:
    ear = Listener()
    editor = Listener(answer=once(4, Edit(truncate=2, append=(120, 121))))
    rig = Rig(endless, controllers=(editor, ear))
    (seq,) = rig.add("p", max_tokens=8, logprobs=0)
    # what may be taken back isn't given out: here nobody holds it back, so start unreported
    while len(seq.tokens) < 6 and rig.scheduler.has_work():
        batches = rig.scheduler.schedule()
        for batch in batches:
            rig.scheduler.commit(batch, rig.run(batch))
        rig.check()
        if 120 in seq.tokens:
            break
    assert seq.tokens[2:] == [120, 121]
    assert seq.lineage == lineage_of(0, REWOUND)
    assert ear.rewound == [2]
    assert ear.heard[-2:] == [("r", 120, "forced"), ("r", 121, "forced")]
    rig.finish()
    assert seq.output_len == 8
    assert [each.token_id for each in seq.logprobs] == seq.tokens[1:]
    assert seq.logprobs[1].logprob == 0.0


def test_truncate_alone_leaves_a_token_to_run() -> None:
    rig = Rig(endless, controllers=(Listener(answer=once(4, Edit(truncate=3))),))
    (seq,) = rig.add("pp", max_tokens=6)
    for _ in range(3):
        for batch in rig.scheduler.schedule():
            rig.scheduler.commit(batch, rig.run(batch))
            rig.check()
    assert len(seq.tokens) == 3
    assert seq.computed == {"main": 2}
    rig.finish()


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Edit(truncate=0), r"Listener: truncate=0 would cut into the prompt \(1\)"),
        (Edit(truncate=1), r"Listener: truncate=1 would take back text .* 4 tokens"),
        (Edit(role="oracle"), r"Listener: no model has the role 'oracle' \(there are: main\)"),
        ([Branch(role="oracle")], r"no model has the role 'oracle'"),
        (Adopt(Sequence("x", 1, [1], None)), "isn't its living child"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_decision_ends_its_sequence_alone(
    decision: Decision, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    first = once(4, decision)
    bad = Listener(answer=lambda seq, event: first(seq, event) if seq.id == "r" else None)
    rig = Rig(endless, controllers=(bad,))
    (seq,) = rig.add("p", max_tokens=8)
    (other,) = rig.add("p", id="other", max_tokens=8)
    rig.finish()
    assert seq.finish is not None
    assert seq.finish.reason == "error"
    with pytest.raises(ValueError, match=message):
        raise ValueError(seq.finish.detail)
    assert other.finish == Finish("length")


def test_an_exception_in_a_watch_is_logged_and_ends_one_sequence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(seq: Sequence, event: TokenEvent) -> Decision:
        if seq.id == "r" and event.position == 3:
            raise KeyError("lost")
        return None

    rig = Rig(endless, controllers=(Listener(answer=fail),))
    (seq,) = rig.add("p", max_tokens=8)
    (other,) = rig.add("p", id="other", max_tokens=8)
    rig.finish()
    assert seq.finish == Finish("error", "Listener: 'lost'")
    assert "in fail" in caplog.text, "the traceback"
    assert other.finish == Finish("length")


@pytest.mark.parametrize(
    "edit", [Edit(append=(97,)), Edit(role="main"), Edit(truncate=1, append=(97,))]
)
def test_going_in_circles_ends(edit: Edit, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    rig = Rig(endless, controllers=(Listener(answer=lambda seq, event: edit),))
    (seq,) = rig.add("p", max_tokens=None)
    for _ in range(10_000):
        for batch in rig.scheduler.schedule():
            rig.scheduler.commit(batch, rig.run(batch))
            rig.check()
        if seq.finish or len(seq.tokens) > 2000:
            break
    if edit == Edit(role="main"):
        assert seq.finish is None, "one decision a token is no circle"
        rig.scheduler.abort("r")
    else:
        assert seq.finish == Finish("error", "Listener: 1000 decisions without a model step")
    rig.finish()


def test_the_first_decision_wins_and_all_hear() -> None:
    ears = [Listener(), Listener()]
    rig = Rig(
        endless,
        controllers=(
            Listener(answer=once(3, Edit(append=(120,)))),
            ears[0],
            Listener(answer=once(3, Edit(append=(121,)))),
            ears[1],
        ),
    )
    (seq,) = rig.add("p", max_tokens=6)
    rig.finish()
    assert seq.tokens[4] == 120
    assert 121 not in seq.tokens
    for ear in ears:
        assert [token for _, token, _ in ear.heard] == seq.tokens[1:]


def test_a_decision_in_the_middle_drops_the_rest_but_a_role_does_not() -> None:
    def interrupt(decision: Decision) -> Callable[[Sequence, TokenEvent], Decision]:
        return lambda seq, event: decision if event.token == 121 else None

    def run(decision: Decision) -> Sequence:
        controllers = (
            Listener(answer=once(2, Edit(append=(120, 121, 122), role="helper"))),
            Listener(answer=interrupt(decision)),
        )
        rig = Rig(endless, roles=("main", "helper"), controllers=controllers)
        (seq,) = rig.add("p", max_tokens=9)
        rig.finish()
        return seq

    cut = run(Edit(append=(99, 99)))
    assert cut.tokens[3:7] == [120, 121, 99, 99]
    assert cut.role == "main"
    kept = run(Edit(role="main"))
    assert kept.tokens[3:6] == [120, 121, 122]
    assert kept.role == "helper"


def test_edit_finishes_after_its_text() -> None:
    rig = Rig(
        endless, controllers=(Listener(answer=once(2, Edit(append=(120,), finish=Finish("stop")))),)
    )
    (seq,) = rig.add("p", max_tokens=9)
    rig.finish()
    assert seq.tokens[3:] == [120]
    assert seq.finish == Finish("stop")


def test_events_tell_entropy_and_own_watch_ids_only() -> None:
    one, two = Listener(watch_ids=(7, 3)), Listener(watch_ids=(5,), entropy=True)
    rig = Rig(says(*b"ab\n\nc"), controllers=(one, two))
    rig.add("p", max_tokens=None)
    rig.finish()
    assert rig.batches[0].needs == (True, (3, 5, 7))
    assert {event.watch for event in one.events} == {(-7.0, -3.0)}
    assert {event.watch for event in two.events} == {(-5.0,)}
    entropies = [float(token % 5) for token in (*b"ab\n\n",)]
    assert two.thoughts[0].mean_entropy == sum(entropies) / 4
    assert (two.thoughts[0].start, two.thoughts[0].end) == (1, 5)
    assert (two.thoughts[1].start, two.thoughts[1].end) == (5, 7), "the end closes a thought"


def test_nothing_is_asked_for_without_need() -> None:
    rig = Rig(endless, controllers=(Listener(),))
    rig.add("p", max_tokens=2)
    rig.finish()
    assert {batch.needs for batch in rig.batches} == {(False, ())}


def test_settled_is_the_least_of_all_watches() -> None:
    rig = Rig(letters, controllers=(Rewinder(),))
    (seq,) = rig.add("abc", max_tokens=80, ignore_eos=True)
    while rig.scheduler.has_work():
        rig.step()
        ends = [3, *[e for e in seq.thought_ends if e <= 3 + len(rig.text.get(("r", 0), []))]]
        assert 3 + len(rig.text.get(("r", 0), [])) in (*ends, len(seq.tokens))
    rig.finish()
    assert seq.lineage != 0, "something was taken back"


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


def test_a_rewind_cuts_thoughts_in_their_middle() -> None:
    script = list(b"a\n\nbc" + b"dd")

    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        return script[len(seen) - 1] if lineage == 0 else [10, 10, EOS][len(seen) - 4]

    rig = Rig(model, controllers=(Listener(answer=once(6, Edit(truncate=4))),))
    (seq,) = rig.add("p", max_tokens=20)
    while seq.finish is None:  # nothing is drained, so all may be taken back
        for batch in rig.scheduler.schedule():
            rig.scheduler.commit(batch, rig.run(batch))
        rig.check()
    rig.finish()
    assert seq.tokens[1:] == [*b"a\n\n\n\n", EOS]
    assert seq.thought_ends == [4], "newlines alone are no thought"


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


def test_a_failing_settled_ends_its_sequence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    class Bad(Listener):
        def watch(self) -> Watch:
            watch = super().watch()
            watch.settled = lambda seq: 1 // (len(seq.tokens) - 3)  # type: ignore[method-assign]
            return watch

    rig = Rig(endless, controllers=(Bad(),))
    (seq,) = rig.add("p", max_tokens=9)
    rig.finish()
    assert seq.finish == Finish("error", "Bad: integer division or modulo by zero")
    assert len(rig.settled) == 1


# the thinking budget


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


# two roles


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


def test_a_rare_role_is_admitted_at_the_switch_and_released_after() -> None:
    def answer(seq: Sequence, event: TokenEvent) -> Decision:
        return {4: Edit(role="full"), 7: Edit(role="main")}.get(event.position)

    rig = Rig(endless, roles=("main", "full"), controllers=(Listener(answer=answer),), pages=7)
    seqs = [rig.add("pp", id=str(i), max_tokens=12)[0] for i in range(4)]
    held = []
    while rig.scheduler.has_work():
        rig.step()
        held.append(["full" in seq.slots for seq in seqs])
    rig.finish()
    assert any(any(row) for row in held)
    assert {len(seq.tokens) for seq in seqs} == {14}
    full = [row for batch in rig.batches if batch.role == "full" for row in batch.rows]
    assert {row.seq.id for row in full} == {"0", "1", "2", "3"}
    assert not any(row.start > 8 for row in full)


def test_a_role_that_can_never_hold_it_ends_the_sequence_with_length() -> None:
    rig = Rig(
        endless,
        roles=("main", "full"),
        controllers=(Listener(answer=once(4, Edit(role="full"))),),
    )
    rig.capacity["full"].pages = 1
    (seq,) = rig.add("pp", max_tokens=9)
    rig.finish()
    assert len(seq.tokens) == 5
    assert seq.finish == Finish("length")
