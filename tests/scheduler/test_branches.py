"""Children: rounds, joins, adoption, scores, crowding, preemption with their parent."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from engine.request import Finish, LogitsRule, Role, SamplingParams, Sequence
from engine.scheduler.controller import Adopt, Branch, Decision, Edit, TokenEvent, Watch
from engine.scheduler.track import lineage_of
from tests.scheduler.fakes import EOS, Model, Rig, ids, logprob_of, noise, text_of
from tests.scheduler.scripted import BestOfN, Listener
from tests.scheduler.test_control import once
from tests.scheduler.test_controllers import prose
from tests.scheduler.test_scheduler import endless


class Round:
    """A controller that asks for these branches at one position, then decides by `join`."""

    def __init__(self, branches: list[Branch], join: Decision | type[Adopt] = None) -> None:
        self.joined: list[list[Sequence]] = []
        self.join = join
        self.controller = Listener(answer=once(4, branches), on_join=self._join)

    def _join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        self.joined.append(list(children))
        return Adopt(children[-1]) if self.join is Adopt else self.join  # type: ignore[return-value]

    def run(
        self, model: Model = endless, roles: Seq[Role] = ("main",), **options: Any
    ) -> tuple[Rig, Sequence]:
        ear = Listener()
        self.ear = ear
        pages, chunk = options.pop("pages", 1000), options.pop("chunk", 32)
        rig = Rig(
            model,
            roles=roles,
            controllers=(self.controller, ear),
            pages=pages,
            max_batched_tokens=chunk,
        )
        (seq,) = rig.add("pp", **{"max_tokens": 12, **options})
        rig.finish()
        return rig, seq


def test_children_are_shown_at_once_and_go() -> None:
    asks = Round([Branch(max_tokens=3), Branch(append=(120,), max_tokens=2)])
    _, seq = asks.run()
    ((one, two),) = asks.joined
    assert one.tokens[5:8] == one.tokens[5:]
    assert two.tokens[5] == 120
    assert len(two.tokens) == 8
    assert one.finish == two.finish == Finish("length")
    assert [one.lineage, two.lineage] == [lineage_of(0, 0), lineage_of(0, 1)]
    assert one.parent is seq
    assert one.prompt_len == 2
    plain = Rig(endless)
    (alone,) = plain.add("pp", max_tokens=12)
    plain.finish()
    assert seq.tokens == alone.tokens, "the parent runs on as if nothing had been"
    assert [token for _, token, _ in asks.ear.heard] == seq.tokens[2:], "no watch hears children"


def test_the_parent_rests() -> None:
    asks = Round([Branch(max_tokens=4)])
    rig, _ = asks.run()
    for batch in rig.batches:
        assert len(batch.rows) == 1


def test_adoption_brings_tokens_and_cells() -> None:
    asks = Round([Branch(max_tokens=3), Branch(append=(120,), max_tokens=2)], Adopt)
    rig, seq = asks.run(logprobs=0)
    ((_, child),) = asks.joined
    assert seq.tokens[5:8] == child.tokens[5:]
    assert [h[2] for h in asks.ear.heard] == ["sampled"] * 3 + ["adopted"] * 3 + ["sampled"] * 6
    assert seq.lineage == 0
    # 11 tokens of the parent, 4 and 3 of children from its last token on, less what was adopted
    assert rig.scheduler.stats().ran_tokens["main"] == 4 + 3 + 3 + 6
    assert seq.logprobs[3:6] == child.logprobs
    assert seq.logprobs[4] == logprob_of("main", seq.tokens[:6], seq.tokens[6])


def test_adopted_text_obeys_the_stop_rules() -> None:
    asks = Round([Branch(append=(120, EOS, 121), max_tokens=2)], Adopt)
    _, seq = asks.run()
    assert seq.tokens[5:] == [120, EOS]
    assert seq.finish == Finish("stop", EOS)
    asks = Round([Branch(max_tokens=50)], Adopt)
    _, seq = asks.run(max_tokens=6)
    assert seq.output_len == 6
    assert seq.finish == Finish("length")


def test_adoption_interrupted_by_another_watch() -> None:
    asks = Round([Branch(append=(120, 121, 122), max_tokens=2)], Adopt)
    cut = Listener(answer=lambda seq, event: Edit(append=(99,)) if event.token == 121 else None)
    rig = Rig(endless, controllers=(asks.controller, cut))
    (seq,) = rig.add("pp", max_tokens=12)
    rig.finish()
    assert seq.tokens[5:8] == [120, 121, 99]
    assert seq.output_len == 12


def test_until_thought_and_its_own_watch() -> None:
    class Own(Watch):
        def __init__(self) -> None:
            self.heard: list[int] = []

        def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
            self.heard.append(event.token)
            return None

    own = Own()
    asks = Round([Branch(append=tuple(ids("\n\n")), until="thought", watch=own)])
    asks.run(prose, max_tokens=60)
    ((child,),) = asks.joined
    assert child.finish is None
    assert text_of(child.tokens[7:]).endswith("\n\n")
    assert child.thought_ends[-1] == len(child.tokens)
    assert own.heard == child.tokens[7:], "what a branch appends is given, not heard"


def test_scored_children_over_chunks() -> None:
    append = tuple(ids("abcdefghij"))
    asks = Round([Branch(role="helper", append=append, until="scored"), Branch(until="scored")])
    _, seq = asks.run(roles=("main", "helper"), chunk=3)
    ((child, empty),) = asks.joined
    assert child.score == [
        logprob_of("helper", child.tokens[:i], child.tokens[i]).logprob for i in range(5, 15)
    ]
    assert empty.score == []
    assert seq.output_len == 12


def test_rounds_keep_old_children_until_the_end() -> None:
    seen: list[list[Sequence]] = []

    def join(seq: Sequence, children: Seq[Sequence]) -> Decision:
        seen.append(list(children))
        if len(seen) < 3:
            return [Branch(append=(120,), max_tokens=1)]
        return Adopt(seen[0][0])

    ear = Listener(answer=once(4, [Branch(max_tokens=2)]), on_join=join)
    rig = Rig(endless, controllers=(ear,))
    (seq,) = rig.add("pp", max_tokens=12)
    rig.finish()
    assert [len(children) for children in seen] == [1, 1, 1]
    assert seq.tokens[5:7] == seen[0][0].tokens[5:]
    assert seen[1][0].lineage == lineage_of(0, 1) != seen[2][0].lineage


def test_children_in_a_child() -> None:
    class Nested(Watch):
        def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
            return [Branch(max_tokens=2)] if event.position == 6 else None

        def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
            return Adopt(children[0])

    asks = Round([Branch(max_tokens=6, watch=Nested()), Branch(max_tokens=2)], Adopt)
    _, seq = asks.run()
    ((child, _),) = asks.joined
    assert len(child.tokens) == 11
    assert seq.output_len == 12


def test_own_params_and_inherited_rules() -> None:
    class Rule:
        forks: list[Rule] = []  # noqa: RUF012

        def mask(self, tokens: Seq[int]) -> None:
            return None

        def fork(self) -> LogitsRule:
            Rule.forks.append(Rule())
            return Rule.forks[-1]

        def rewind(self, pos: int) -> None:
            pass

    class Ruled(Listener):
        def watch(self) -> Watch:
            watch = super().watch()
            watch.rules = lambda seq: (Rule(),)  # type: ignore[method-assign]
            return watch

    params = SamplingParams(temperature=0.0, allowed_token_ids=[97], max_tokens=1)
    joined: list[Sequence] = []

    def join(seq: Sequence, children: Seq[Sequence]) -> Decision:
        joined.extend(children)
        return None

    ruled = Ruled(answer=once(4, [Branch(params=params, max_tokens=3)]), on_join=join)
    rig = Rig(endless, controllers=(ruled,))
    rig.add("pp", max_tokens=9, logit_bias={5: 1.0})
    rig.finish()
    (child,) = joined
    assert len(child.tokens) == 8, "max_tokens of the params is about a whole output"
    assert child.params is params
    assert child.rules == tuple(Rule.forks)


def test_crowded_children_run_in_rounds_with_the_same_result() -> None:
    branches = [Branch(max_tokens=12), Branch(append=(120,), max_tokens=12), Branch(max_tokens=9)]
    results = []
    for pages in (1000, 9, 7):
        asks = Round(branches, Adopt)
        rig, seq = asks.run(pages=pages, max_tokens=20)
        results.append(([c.tokens for c in asks.joined[0]], seq.tokens))
        assert rig.scheduler.stats().preemptions == 0
    assert results[0] == results[1] == results[2]


def test_children_that_do_not_fit_wait_and_do_not_start_over_and_over() -> None:
    branches = [Branch(max_tokens=80)] * 3
    roomy, _ = Round(branches, Adopt).run(max_tokens=200)
    tight, _ = Round(branches, Adopt).run(max_tokens=200, pages=30)
    needed = roomy.scheduler.stats().ran_tokens["main"]
    assert tight.scheduler.stats().ran_tokens["main"] < 1.1 * needed


def test_a_child_alone_on_the_last_page_ends_with_length() -> None:
    asks = Round([Branch(max_tokens=None), Branch(max_tokens=2)])
    rig, seq = asks.run(pages=4, max_tokens=40)
    ((one, two),) = asks.joined
    assert one.finish == Finish("length")
    assert len(one.tokens) <= 17
    assert len(two.tokens) == 7
    assert seq.finish == Finish("length")
    assert rig.text["r", 0] == seq.tokens[2:]


def test_families_that_wait_for_each_other_come_apart() -> None:
    """Two resting parents hold all pages: the younger goes, with its children, and comes back."""
    asks = [once(9, [Branch(max_tokens=8), Branch(max_tokens=8)]) for _ in range(2)]

    def answer(seq: Sequence, event: TokenEvent) -> Decision:
        return asks[int(seq.id)](seq, event)

    def join(seq: Sequence, children: Seq[Sequence]) -> Decision:
        return Adopt(children[1])

    results = []
    for pages in (1000, 6):
        asks = [once(9, [Branch(max_tokens=8), Branch(max_tokens=8)]) for _ in range(2)]
        rig = Rig(endless, controllers=(Listener(answer=answer, on_join=join),), pages=pages)
        seqs = [rig.add("p" * 5, id=str(i), max_tokens=14)[0] for i in range(2)]
        rig.finish()
        results.append([seq.tokens for seq in seqs])
    assert rig.scheduler.stats().preemptions > 0
    assert results[0] == results[1]


def test_abort_and_errors_take_children_along(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    asks = once(4, [Branch(max_tokens=50), Branch(max_tokens=50)])
    rig = Rig(endless, controllers=(Listener(answer=asks),))
    rig.add("pp", max_tokens=100)
    for _ in range(6):
        rig.step()
    assert len(rig.capacity["main"].slots) == 3
    batches = rig.scheduler.schedule()
    outs = [rig.run(batch) for batch in batches]
    rig.scheduler.abort("r")
    for batch, out in zip(batches, outs, strict=True):
        rig.scheduler.commit(batch, out)
    rig.finish()

    class Fails(Watch):
        def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
            raise RuntimeError("no")

    failing = Round([Branch(watch=Fails(), max_tokens=5), Branch(max_tokens=2)])
    _, seq = failing.run()
    ((one, _),) = failing.joined
    assert one.finish == Finish("error", "Listener: no")
    assert seq.finish == Finish("length"), "a child's error is its own"


def test_rounds_without_work_come_to_an_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    asks = Round([Branch(until="scored")], join=[Branch(until="scored")])
    _, seq = asks.run()
    assert seq.finish == Finish("error", "Listener: 1000 decisions without a model step")


def test_branches_at_once_from_begin() -> None:
    asked: list[Sequence] = []

    def begin(seq: Sequence) -> Decision:
        return [Branch(max_tokens=2), Branch(append=(99,), max_tokens=2)]

    def join(seq: Sequence, children: Seq[Sequence]) -> Decision:
        asked.extend(children)
        return Adopt(children[1])

    rig = Rig(endless, controllers=(Listener(on_begin=begin, on_join=join),))
    choices = rig.add("pppp", n=2, max_tokens=5)
    rig.finish()
    assert all(choice.tokens[4] == 99 for choice in choices)
    assert len(asked) == 4


def test_a_branch_in_a_role_that_is_not_held() -> None:
    asks = Round([Branch(role="judge", max_tokens=2)])
    rig, seq = asks.run(roles=("main", "judge"))
    assert rig.scheduler.stats().ran_tokens["judge"] == 4 + 2
    assert seq.output_len == 12


def test_a_branch_whose_role_can_never_hold_it_ends_with_length() -> None:
    asks = Round([Branch(role="judge", max_tokens=2), Branch(max_tokens=2)])
    rig = Rig(endless, roles=("main", "judge"), controllers=(asks.controller,))
    rig.capacity["judge"].pages = 1
    (seq,) = rig.add("pp", max_tokens=9)
    rig.finish()
    ((one, two),) = asks.joined
    assert (one.finish, len(one.tokens)) == (Finish("length"), 5)
    assert len(two.tokens) == 7
    assert seq.output_len == 9


def test_nested_children_run_one_at_a_time_on_few_pages() -> None:
    class Nested(Watch):
        def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
            if event.position == 8:
                return [Branch(max_tokens=7), Branch(max_tokens=7)]
            return None

        def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
            return Adopt(children[1])

    results = []
    for pages in (1000, 12, 9, 8):
        asks = Round([Branch(max_tokens=14, watch=Nested()) for _ in range(3)], Adopt)
        _, seq = asks.run(pages=pages, max_tokens=24)
        results.append(([c.tokens for c in asks.joined[0]], seq.tokens))
        assert all(len(c.tokens) == 19 for c in asks.joined[0])
    assert all(result == results[0] for result in results)


def test_best_of_n_adopts_the_best_and_the_others_listen() -> None:
    ear = Listener()
    rig = Rig(
        prose,
        roles=("main", "helper"),
        controllers=(BestOfN(), ear),
        pages=40,
        max_batched_tokens=16,
    )
    seqs = [rig.add("pp" + "a" * i, id=str(i), max_tokens=60)[0] for i in range(3)]
    rig.finish()
    for seq in seqs:
        heard = [(token, origin) for name, token, origin in ear.heard if name == seq.id]
        assert [token for token, _ in heard] == seq.tokens[seq.prompt_len :]
        assert {"adopted", "sampled"} == {origin for _, origin in heard}
        assert seq.output_len == 60
    assert rig.scheduler.stats().ran_tokens["helper"] > 0


def test_best_of_n_picks_by_score() -> None:
    """Redo one choice by hand: candidates on both roles, scored by main, the best mean wins."""
    rig = Rig(prose, roles=("main", "helper"), controllers=(BestOfN(every=1, each=1),))
    (seq,) = rig.add("pp", max_tokens=60)
    rig.finish()
    begin = seq.thought_ends[0]
    candidates = []
    for born, role in enumerate(("main", "helper")):
        tokens = seq.tokens[:begin]
        while len(tokens) - begin < 6 and tokens[begin:][-2:] != [10, 10]:
            tokens.append(prose(role, tokens, lineage_of(0, born)))
        scores = [logprob_of("main", tokens[:i], tokens[i])[1] for i in range(begin, len(tokens))]
        candidates.append((sum(scores) / len(scores), tokens))
    best = max(candidates)[1]
    assert seq.tokens[: len(best)] == best
    assert noise("main") != noise("helper")
