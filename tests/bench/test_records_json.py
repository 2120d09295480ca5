"""Records to JSON and back, and what isn't one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from bench.evaluation.records import Run, Usage
from bench.evaluation.records_json import (
    from_json,
    line_from_json,
    line_to_json,
    to_json,
)
from engine.scheduler.detect import Loop
from tests.bench.samples import run_of, sample


def a_run() -> Run:
    return run_of(
        [
            sample("p0", 7, loop=Loop(start=3, period=2), text="é ∑ \n"),
            sample("p1", 11, closed=None, digest=None, answer=None, verdict="unanswered"),
            sample("p0", 13, task="b", seconds=0.1 + 0.2, seed=2**63),
            sample("p1", 0, task="b", verdict="error", error="lost", anatomy=None),
        ],
        tasks=["sums", "b"],
    )


def read_back(run: Run) -> Run:
    return from_json(json.dumps(to_json(run), allow_nan=False), "run.json")


def test_a_run_comes_back_as_it_was() -> None:
    assert read_back(a_run()) == a_run()


def test_the_summary_lies_flat() -> None:
    run, data = a_run(), to_json(a_run())
    assert data["version"] == 1
    assert data["accuracy"] == run.summary.accuracy
    assert data["thinking_tokens_mean"] == run.summary.thinking_tokens_mean
    assert (data["sample_count"], len(data["samples"])) == (3, 4)
    assert data["tasks"]["b"]["accuracy_ci"] == list(run.tasks["b"].accuracy_ci)


def test_lines_of_a_record() -> None:
    for one in a_run().samples:
        usage = Usage(wall_seconds=0.1, kv_peak_bytes=2**50, ran_tokens={"main": 3})
        assert line_from_json(json.dumps(line_to_json(one, usage)), "part:2") == (one, usage)


def test_whole_numbers_are_read_as_the_floats_they_stand_for() -> None:
    data = to_json(a_run())
    data["samples"][0]["seconds"] = 1
    seconds = from_json(json.dumps(data), "run.json").samples[0].seconds
    assert (seconds, type(seconds)) == (1.0, float)


def test_keys_of_others_are_passed_over() -> None:
    data: dict[str, Any] = {**to_json(a_run()), "comparison": {}}
    data["samples"][0]["mood"] = "good"
    data["tasks"]["b"]["mood"] = "good"
    assert from_json(json.dumps(data), "run.json") == a_run()


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split(".")

    def change(data: Any) -> None:
        for name in parents:
            data = data[int(name) if name.isdigit() else name]
        data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (_set("version", 2), "version: .*1"),
        (lambda data: data.pop("version"), "version: .*required"),
        (lambda data: data.pop("accuracy"), "accuracy: .*required"),
        (lambda data: data.pop("sample_count"), "sample_count: .*required"),
        (lambda data: data.pop("samples"), "samples: .*required"),
        (lambda data: data["samples"][1].pop("closed"), r"samples\[1\].closed: .*required"),
        (_set("tasks", []), "tasks: .*valid dictionary|tasks: .*object"),
        (_set("name", None), "name: .*string"),
        (_set("settings", "none"), "settings: .*object"),
        (_set("accuracy", float("nan")), "accuracy: .*finite"),
        (_set("settings", {"x": [float("inf")]}), "settings: Out of range"),
        (_set("accuracy_ci", [0.5]), r"accuracy_ci\[1\]: .*required"),
        (_set("tasks.b.right", 1.5), "tasks.b.right: .*integer"),
        (_set("tasks.b.tokens_by_role", {"main": "7"}), "tasks.b.tokens_by_role.main: .*integer"),
        (_set("samples.0.verdict", "maybe"), r"samples\[0\].verdict: .*'right', 'wrong'"),
        (_set("samples.0.verdict", []), r"samples\[0\].verdict: .*'right', 'wrong'"),
        (_set("samples.0.index", True), r"samples\[0\].index: .*integer"),
        (_set("samples.0.loop", {"start": 1}), r"samples\[0\].loop.period: .*required"),
        (_set("samples.0.task", "other"), r"samples\[0\].task 'other' is not one of tasks"),
        (_set("samples.1.problem", "p0"), r"samples\[1\] is there twice"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(
    change: Callable[[dict[str, Any]], object], wrong: str
) -> None:
    data = to_json(a_run())
    change(data)
    with pytest.raises(ValueError, match=f"^run.json isn't a record of a run: .*{wrong}"):
        from_json(json.dumps(data), "run.json")


def test_other_things_are_no_record() -> None:
    for text in ("[1]", '{"version": 1', "", b"\xff"):
        with pytest.raises(ValueError, match=r"^run.json isn't a record of a run: I"):
            from_json(text, "run.json")
    for line, wrong in (
        ("{}", "sample: .*required"),
        ('{"sample": {}}', "sample.task: .*required"),
    ):
        with pytest.raises(ValueError, match=f"part:3 isn't a record of a sample: {wrong}"):
            line_from_json(line, "part:3")
