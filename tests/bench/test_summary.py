"""A task's figures: who counts where, and what isn't told."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench.evaluation.intervals import accuracy_interval, wilson
from bench.evaluation.records import Anatomy, Sample, Usage, Verdict
from bench.evaluation.records_json import to_json
from bench.evaluation.summary import summarise
from engine.scheduler.detect import Loop
from tests.bench.samples import run_of, sample

CRASHED: dict[str, Any] = {"verdict": "error", "error": "out of memory", "anatomy": None}


def chain(first_right: float | None, repetition: float = 0.0) -> Anatomy:
    return Anatomy(thoughts=4, repetition=repetition, first_answer=None, first_right=first_right)


def verdicts(*given: Verdict) -> list[Sample]:
    return [sample(f"p{i}", verdict=verdict) for i, verdict in enumerate(given)]


def test_token_figures() -> None:
    summary = summarise(
        [sample(f"p{i}", 10 * i, answer_tokens=i) for i in range(1, 6)], [Usage(wall_seconds=5.0)]
    )
    assert (summary.problems, summary.sample_count) == (5, 5)
    assert summary.thinking_tokens_mean == summary.thinking_tokens_median == 30.0
    assert summary.thinking_tokens_p90 == pytest.approx(46.0)  # linear between 40 and 50
    assert (summary.answer_tokens_mean, summary.answer_tokens_median) == (3.0, 3.0)
    assert summary.answer_tokens_p90 == pytest.approx(4.6)
    assert summary.tokens_per_s == (150 + 15) / 5
    assert summary.seconds_per_correct == 1.0


def test_verdicts_count_where_they_should() -> None:
    samples = [
        *verdicts("right", "wrong", "unanswered"),
        sample("p3", 110, verdict="grader_error", finish_reason="length"),
        sample("p4", 9999, **CRASHED, finish_reason="error"),
    ]
    summary = summarise(samples, [Usage(wall_seconds=1.0)])
    assert (summary.problems, summary.sample_count, summary.right) == (4, 4, 1)
    assert (summary.errors, summary.grader_errors) == (1, 1)
    assert summary.accuracy == pytest.approx(1 / 3)
    assert summary.accuracy_ci == wilson(1 / 3, 3)
    assert summary.thinking_tokens_mean == (10 + 10 + 10 + 110) / 4
    assert (summary.never_answered_share, summary.limit_share) == (0.25, 0.25)
    assert summary.tokens_per_s == 140 + 8


def test_problems_weigh_alike_however_many_samples_were_graded() -> None:
    samples = [
        *(sample("p0", index=i) for i in range(4)),
        sample("p1", index=0, verdict="wrong"),
        sample("p1", index=1, verdict="grader_error"),
    ]
    summary = summarise(samples, [])
    assert (summary.accuracy, summary.accuracy_ci) == accuracy_interval([1.0, 0.0], 5)


def test_problems_of_two_tasks_are_two() -> None:
    samples = [sample("p0", task="a"), sample("p0", task="b", verdict="wrong")]
    assert (summarise(samples, []).problems, summarise(samples, []).accuracy) == (2, 0.5)


def test_chains() -> None:
    samples = [
        sample("p0", anatomy=chain(0.2, repetition=0.5), loop=Loop(start=30, period=4)),
        sample("p1", anatomy=chain(0.4), verdict="wrong", closed=False),
        sample("p2", anatomy=chain(None), verdict="unanswered"),
        sample("p3", anatomy=chain(0.6), verdict="grader_error"),
        sample("p4", **CRASHED, loop=Loop(start=1, period=1), closed=False),
    ]
    summary = summarise(samples, [])
    assert (summary.thoughts_mean, summary.repetition_mean) == (4.0, 0.125)
    assert summary.first_answer_mean is None
    assert summary.first_right_mean == pytest.approx(0.4)
    assert summary.wrong_but_reached_share == 0.5
    assert (summary.unclosed_share, summary.looped_share) == (0.25, 0.25)
    assert summary.loop_start_mean == 30.0


def test_what_is_not_told_is_none() -> None:
    summary = summarise([sample(closed=None, digest=None)], [Usage(wall_seconds=0.0)])
    assert (summary.unclosed_share, summary.looped_share, summary.loop_start_mean) == (None,) * 3
    assert (summary.wrong_but_reached_share, summary.tokens_per_s) == (None, 0.0)


def test_costs_add_up() -> None:
    first = Usage(
        wall_seconds=2.0,
        cpu_seconds=3.0,
        steps=5,
        kv_byte_steps=100.0,
        kv_byte_seconds=10.0,
        kv_side_byte_seconds=1.0,
        kv_peak_bytes=70,
        preemptions=1,
        ran_tokens={"main": 5, "helper": 1},
    )
    second = Usage(
        wall_seconds=1.0,
        cpu_seconds=2.0,
        kv_byte_seconds=4.0,
        kv_peak_bytes=60,
        preemptions=0,
        ran_tokens={"main": 2, "full": 4},
    )
    summary = summarise(verdicts("right", "right", "wrong"), [first, second])
    assert (summary.wall_seconds, summary.cpu_seconds) == (3.0, 5.0)
    assert (summary.seconds_per_correct, summary.cpu_seconds_per_correct) == (1.5, 2.5)
    assert (summary.kv_byte_seconds, summary.kv_byte_seconds_per_correct) == (14.0, 7.0)
    assert (summary.kv_byte_steps, summary.kv_side_byte_seconds) == (None, None)
    assert (summary.kv_peak_bytes, summary.preemptions) == (70, 1)
    assert summary.tokens_by_role == {"main": 7, "helper": 1, "full": 4}


def test_nothing_right_has_no_cost_of_one() -> None:
    usage = Usage(wall_seconds=2.0, cpu_seconds=1.0, kv_byte_seconds=1.0)
    summary = summarise(verdicts("wrong"), [usage])
    assert summary.seconds_per_correct is None
    assert summary.cpu_seconds_per_correct is None
    assert summary.kv_byte_seconds_per_correct is None


def test_all_crashed_is_a_summary_that_json_holds() -> None:
    summary = summarise([sample(**CRASHED)], [Usage(wall_seconds=1.0)])
    assert (summary.errors, summary.sample_count, summary.problems) == (1, 0, 0)
    assert (summary.accuracy, summary.accuracy_ci) == (0.0, (0.0, 1.0))
    assert sum(v for v in asdict(summary).values() if isinstance(v, float)) == 1.0  # the wall clock
    assert to_json(run_of([sample(**CRASHED)]))["accuracy"] == 0.0


def test_no_samples() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarise([], [Usage()])
