"""Answers of a given form while their sequences are preempted, forced, branched and rewound."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest

from engine import Engine, ReasoningSpec, SamplingParams
from engine.request import Sequence
from engine.scheduler.controller import (
    Adopt,
    Branch,
    Controller,
    Decision,
    Edit,
    TokenEvent,
    Watch,
)
from tests.engines import assert_idle, run_all
from tests.scripted import tiny_folder, tiny_spec
from tests.test_grammar import PERSON, check_answer, of_schema

PAIRS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "minItems": 2,
    "maxItems": 3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def opened(folder: str, **spec: Any) -> Iterator[Engine]:
    """A model without thinking markers: it is bound from its first token."""
    with Engine(tiny_spec(folder, reasoning=ReasoningSpec(), **spec)) as engine:
        yield engine
        assert_idle(engine)


def test_preempted_answers_are_the_same(folder: str) -> None:
    params = SamplingParams(seed=1, temperature=1.2, max_tokens=120, n=4, grammar=of_schema(PERSON))
    with opened(folder) as engine:
        calm = engine.generate("x" * 40, params)[0]
    with opened(folder, tokens=112) as crowded:
        crowded.add("x" * 40, params, id="a")
        pressed = run_all(crowded)["a"]
        assert crowded.stats().scheduler.preemptions > 0
    assert [c.token_ids for c in pressed.choices] == [c.token_ids for c in calm.choices]
    for choice in pressed.choices:
        check_answer(choice, PERSON)


class Forces(Controller):
    """Text into the answers of one request."""

    def watch(self) -> Watch:
        return _ForcesWatch()


class _ForcesWatch(Watch):
    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        wanted = seq.params.min_p == 0.5 and event.origin == "sampled"
        return Edit(append=(7,)) if wanted else None


def test_text_forced_into_the_answer_ends_its_sequence_alone(folder: str) -> None:
    params = [
        SamplingParams(seed=1, min_p=min_p, grammar=of_schema(PERSON), max_tokens=200)
        for min_p in (0.5, 0.0)
    ]
    with opened(folder, controllers=(Forces(),)) as engine:
        forced, free = engine.generate(["Hi", "Hi"], params)
    assert forced.finish_reason == "error"
    assert "was forced into the answer" in str(forced.choices[0].stop_reason)
    check_answer(free.choices[0], PERSON)


class Branches(Controller):
    """Every few tokens two children go on alone; the second one's text is adopted."""

    children = {"main": 2}  # noqa: RUF012

    def watch(self) -> Watch:
        return _BranchesWatch()


class _BranchesWatch(Watch):
    def __init__(self) -> None:
        self.rounds = 0

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        if event.origin != "sampled" or seq.output_len % 4 or self.rounds > 5:
            return None
        self.rounds += 1
        return [Branch(max_tokens=3), Branch(max_tokens=5)]

    def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        return Adopt(children[1])


class Rewinds(Controller):
    """Takes back a run of tokens a few times."""

    def watch(self) -> Watch:
        return _RewindsWatch()


class _RewindsWatch(Watch):
    def __init__(self) -> None:
        self.times = 0

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        if self.times < 6 and seq.output_len >= 7 + self.times:
            self.times += 1
            return Edit(truncate=len(seq.tokens) - 5 - self.times % 3)
        return None

    def settled(self, seq: Sequence) -> int:
        return seq.prompt_len if self.times < 6 else len(seq.tokens)


@pytest.mark.parametrize("controller", [Branches(), Rewinds()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("schema", [PERSON, PAIRS], ids=["person", "pairs"])
def test_forms_survive_branches_and_rewinds(
    folder: str, controller: Controller, schema: dict[str, Any]
) -> None:
    params = SamplingParams(n=6, seed=8, temperature=1.3, max_tokens=300, grammar=of_schema(schema))
    with opened(folder, controllers=(controller,)) as engine:
        engine.add("Hi", params, id="a")
        output = run_all(engine)["a"]
    for choice in output.choices:
        check_answer(choice, schema)
    steered = sum(sum(choice.edits.values()) for choice in output.choices)
    assert steered > 0 or isinstance(controller, Branches)
