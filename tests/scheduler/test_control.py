"""Edits, events and errors; the thinking budget; two roles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest

from engine.request import Finish, LogitsRule, Mask, Role, Sequence
from engine.scheduler.controller import Adopt, Branch, Decision, Edit, TokenEvent, Watch
from engine.scheduler.track import REWOUND, lineage_of
from tests.scheduler.fakes import EOS, Model, Rig, letters
from tests.scheduler.scripted import Listener, Rewinder
from tests.scheduler.test_scheduler import endless


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


class Broken:
    """A rule that fails in one of its hooks."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def mask(self, tokens: Seq[int]) -> Mask | None:
        return None

    def fork(self) -> LogitsRule:
        if self.hook == "fork":
            raise RuntimeError("no copy")
        return self

    def rewind(self, pos: int) -> None:
        if self.hook == "rewind":
            raise RuntimeError("no way back")


@pytest.mark.parametrize(
    ("hook", "decision", "message"),
    [
        ("rules", None, "Ruled: no rules"),
        ("rewind", Edit(truncate=2), "Broken: no way back"),
        ("fork", [Branch()], "Ruled: no copy"),
    ],
)
def test_an_exception_of_a_rule_ends_one_sequence(
    hook: str, decision: Decision, message: str
) -> None:
    class Ruled(Listener):
        def watch(self) -> Watch:
            watch = super().watch()

            def rules(seq: Sequence) -> tuple[LogitsRule, ...]:
                if seq.id != "r":
                    return ()
                if hook == "rules":
                    raise RuntimeError("no rules")
                return (Broken(hook),)

            watch.rules = rules  # type: ignore[method-assign]
            watch.settled = lambda seq: 0  # type: ignore[method-assign]
            return watch

    def act(seq: Sequence, event: TokenEvent) -> Decision:
        return decision if seq.id == "r" and event.position == 3 else None

    rig = Rig(endless, controllers=(Ruled(answer=act),))
    (seq,) = rig.add("p", max_tokens=8)
    (other,) = rig.add("p", id="other", max_tokens=8)
    rig.finish()
    assert seq.finish == Finish("error", message)
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
