"""Runs in turns, and what their steps say."""

import itertools
from collections.abc import Iterator

import pytest

from bench import long
from bench.common import fixed_length
from bench.steps import Step, rates, steps_of, summary
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from tests.conftest import MakeEngine
from tests.engines import prompts


def step(seconds: float, compaction: float = 0.0, tokens: int = 1, wait: int = 0) -> Step:
    return Step(seconds, compaction, tokens, 2, 100, 10, wait, ())


def test_runs_take_turns_until_each_has_ended() -> None:
    order = []

    def run(name: str, count: int) -> Iterator[Step]:
        for _ in range(count):
            order.append(name)
            yield step(1.0)

    found = long.in_turns({"a": run("a", 3), "b": run("b", 5)}, 2.0)
    assert "".join(order) == "aabbabbb"
    assert [len(steps) for steps in found.values()] == [3, 5]


def test_what_steps_say() -> None:
    said = summary([step(1.0), step(1.5, 0.5, wait=3), step(4.0, 3.0, 5), step(1.0)])
    assert said["step_seconds_median"] == 1.0
    assert said["compaction_share"] == pytest.approx(3.5 / 7.5)
    assert said["compaction_longest_in_steps"] == 3.0
    assert said["wait_longest_steps"] == 3
    assert rates([step(1.0), step(1.0), step(2.0, 0.0, 6)], 2) == [0.5, 3.5]


def test_steps_of_a_run(make_engine: MakeEngine) -> None:
    engine = make_engine(kv=KVSpec(policy=SnapKV(), budget_tokens=16, window=16))
    clock = itertools.count()
    asked = prompts(3)
    steps = list(steps_of(engine, asked, fixed_length(40), lambda: next(clock)))
    outputs = [output for each in steps for output in each.outputs]
    assert [len(output.token_ids) for output in outputs] == [40] * 3
    assert sum(each.tokens for each in steps) == 120
    assert max(each.streams for each in steps) == 3
    spent = [each.compaction for each in steps]
    assert all(0 < c < each.seconds for c, each in zip(spent, steps, strict=True))
    assert type(engine.caches["main"].compress).__name__ == "method", "the stopwatch is gone"
