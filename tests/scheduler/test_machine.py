"""Random arrivals, aborts, branches, edits and role switches over tiny pools.

Whatever happens around a request, its tokens are those that it gets alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.request import Sequence
from engine.scheduler.controller import Controller
from engine.scheduler.controllers.alternate import Alternate
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.reasoning import Markers
from tests.scheduler.fakes import Rig, ids, token_bytes
from tests.scheduler.scripted import BestOfN, Listener, Rewinder

PLAIN = Markers(closing=tuple(ids("\n\ncc\\boxed{")))


@cache
def controllers_of(kind: str) -> tuple[Controller, ...]:
    budget = ThinkingBudget(markers=PLAIN, token_bytes=token_bytes)
    return {
        "plain": (),
        "budget": (budget,),
        "alternate": (Alternate(), budget),
        "rewind": (Rewinder(), Listener()),
        "rewind-alternate": (Rewinder(), Alternate()),
        "best": (BestOfN(max_tokens=14), Listener()),
        "all": (BestOfN(every=3), Rewinder(), Alternate(), budget),
    }[kind]


def rig_of(kind: str, **options: Any) -> Rig:
    return Rig(roles=("main", "helper"), controllers=controllers_of(kind), markers=PLAIN, **options)


@cache
def alone(kind: str, prompt: str, params: tuple[tuple[str, Any], ...]) -> list[list[int]]:
    rig = rig_of(kind, max_batched_tokens=1000)
    choices = rig.add(prompt, **dict(params))
    rig.finish()
    return [choice.tokens for choice in choices]


class Machine(RuleBasedStateMachine):
    rig: Rig

    @initialize(
        kind=st.sampled_from(
            ["plain", "budget", "alternate", "rewind", "rewind-alternate", "best", "all"]
        ),
        pages=st.sampled_from([21, 22, 24, 30, 60]),
        chunk=st.integers(5, 40),
        seqs=st.integers(1, 5),
        cut=st.sampled_from([None, None, 6]),
        prefix=st.integers(0, 6),
    )
    def start(
        self, kind: str, pages: int, chunk: int, seqs: int, cut: int | None, prefix: int
    ) -> None:
        self.kind = kind
        self.rig = rig_of(
            kind,
            pages=pages,
            max_batched_tokens=chunk,
            max_num_seqs=seqs,
            cut=cut,
            prefix=prefix,
        )
        self.requests: dict[str, tuple[str, tuple[tuple[str, Any], ...], list[Sequence]]] = {}
        self.aborted: set[str] = set()

    @rule(
        prompt=st.text("abc\n", min_size=1, max_size=20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        max_tokens=st.integers(1, 40),
        budget=st.sampled_from([None, 0, 3, 9]),
        stop=st.sampled_from([(), ("ca",), ("bb", "abc")]),
        logprobs=st.sampled_from([None, 0]),
        prompt_logprobs=st.sampled_from([None, 0]),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt: str, n: int, priority: int, budget: int | None, **params: Any) -> None:
        key = tuple(sorted({**params, "n": n, "thinking_token_budget": budget}.items()))
        name = str(len(self.requests))
        choices = self.rig.add(prompt, id=name, priority=priority, **dict(key))
        self.requests[name] = (prompt, key, choices)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0))
    def abort(self, pick: int) -> None:
        name = str(pick % len(self.requests))
        self.aborted.add(name)
        self.rig.scheduler.abort(name)
        self.rig.check()

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0))
    def abort_in_flight(self, pick: int) -> None:
        name = str(pick % len(self.requests))
        self.aborted.add(name)
        batches = self.rig.scheduler.schedule()
        before = [len(seq.tokens) for seq in self.requests[name][2]]
        outs = [self.rig.run(batch) for batch in batches]
        self.rig.scheduler.abort(name)
        for batch, out in zip(batches, outs, strict=True):
            self.rig.scheduler.commit(batch, out)
            self.rig.check()
        assert [len(seq.tokens) for seq in self.requests[name][2]] == before
        self.rig.drain()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.finish()
        for name, (prompt, params, choices) in self.requests.items():
            expected = alone(self.kind, prompt, params)
            for choice, tokens in zip(choices, expected, strict=True):
                assert choice.finish is not None
                assert self.rig.text[name, choice.index] == choice.tokens[choice.prompt_len :]
                if choice.finish.reason == "abort":
                    assert name in self.aborted
                    continue
                assert choice.finish.reason in ("stop", "length"), choice.finish
                assert choice.tokens == tokens
                if dict(params)["logprobs"] is not None:
                    assert [each.token_id for each in choice.logprobs] == tokens[len(prompt) :]
                unrun = dict(params)["thinking_token_budget"] == 0 and len(tokens) <= len(
                    prompt
                ) + len(PLAIN.closing)  # the closing phrase alone reached max_tokens
                if dict(params)["prompt_logprobs"] is not None and not unrun:
                    assert [each.token_id for each in choice.prompt_logprobs] == ids(prompt)[1:]


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
