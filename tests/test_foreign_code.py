"""What a controller, a watch or a rule does wrong ends its own request; the others don't notice."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.request import Mask, Sequence
from engine.scheduler.controller import Branch, Controller, Edit, TokenEvent, Watch
from tests.conftest import MakeEngine
from tests.engines import assert_idle, greedy, run_all

BAD = 666
"""The seed of the request that is treated badly."""


class Rule:
    """Fails where it's told to."""

    def __init__(self, mask: Mask | None = None, fails: str = "") -> None:
        self._mask, self._fails = mask, fails

    def _call(self, name: str) -> None:
        if name == self._fails:
            raise KeyError("boom")

    def mask(self, tokens: object) -> Mask | None:
        self._call("mask")
        return self._mask

    def fork(self) -> "Rule":
        self._call("fork")
        return self

    def rewind(self, pos: int) -> None:
        self._call("rewind")


@dataclass(frozen=True)
class Foreign(Controller):
    """Its watch of the bad request answers `decide` once and has this rule."""

    decide: Callable[[], Any] = lambda: None
    rule: Any = None
    settles: Any = None

    def watch(self) -> Watch:
        return ForeignWatch(self)


class ForeignWatch(Watch):
    def __init__(self, controller: Foreign) -> None:
        self._c = controller
        self._done = False

    def on_token(self, seq: Sequence, event: TokenEvent) -> Any:
        if seq.params.seed == BAD and not self._done:
            self._done = True
            return self._c.decide()
        return None

    def rules(self, seq: Sequence) -> Any:
        return (self._c.rule,) if seq.params.seed == BAD and self._c.rule is not None else ()

    def settled(self, seq: Sequence) -> Any:
        return self._c.settles if seq.params.seed == BAD and self._c.settles else seq.prompt_len


CASES = {
    "no decision": (Foreign(decide=lambda: "x"), "decides 'x'"),
    "no branch": (Foreign(decide=lambda: [Edit()]), "no Branch"),
    "no token": (Foreign(decide=lambda: Edit(append=(10**9,))), "token id 1000000000"),
    "no tokens": (Foreign(decide=lambda: Edit(append=None)), "tuple of token ids"),  # type: ignore[arg-type]
    "no length": (Foreign(decide=lambda: Edit(truncate="x")), "Edit.truncate"),  # type: ignore[arg-type]
    "no finish": (Foreign(decide=lambda: Edit(finish="x")), "Edit.finish"),  # type: ignore[arg-type]
    "no child's token": (Foreign(decide=lambda: [Branch(append=(-1,))]), "token id -1"),
    "no params": (Foreign(decide=lambda: [Branch(params=5)]), "Branch.params"),  # type: ignore[arg-type]
    "no count": (Foreign(settles="x"), "invalid literal"),
    "fork": (Foreign(lambda: [Branch(max_tokens=2)], Rule(fails="fork")), "boom"),
    "rewind": (Foreign(lambda: Edit(truncate=3), Rule(fails="rewind")), "boom"),
    "mask": (Foreign(rule=Rule(fails="mask")), "boom"),
    "no rule": (Foreign(rule=5), "logits rules failed"),
    "banned stranger": (Foreign(rule=Rule(Mask(ban=(-1,)))), "outside the vocabulary"),
    "allowed stranger": (Foreign(rule=Rule(Mask(allow=(10**9,)))), "outside the vocabulary"),
}


@pytest.mark.parametrize(("controller", "words"), CASES.values(), ids=CASES)
def test_only_its_own_request_ends(
    controller: Foreign, words: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(controllers=(controller,))
    for i, seed in enumerate((1, BAD, 2)):
        engine.add([1, 2, 3 + i], replace(greedy(6), seed=seed), id=str(i))
    outputs = run_all(engine)
    assert [outputs[str(i)].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert words in str(outputs["1"].choices[0].stop_reason)
    assert_idle(engine)


class Unmade(Controller):
    def watch(self) -> Watch:
        raise KeyError("boom")


def test_a_watch_that_cant_be_made_ends_its_request(make_engine: MakeEngine) -> None:
    engine = make_engine(controllers=(Unmade(),))
    (output,) = engine.generate([[1, 2]], greedy(3))
    assert output.finish_reason == "error"
    assert output.choices[0].stop_reason == "Unmade: 'boom'"
    assert_idle(engine)
