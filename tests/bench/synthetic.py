"""Made-up runs: no engine, no statistics, figures that a test can look for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.evaluation.records import (
    Anatomy,
    Comparison,
    Ratio,
    Run,
    Sample,
    Summary,
    TaskComparison,
    Verdict,
)
from engine.scheduler.detect import Loop

ANATOMY = Anatomy(thoughts=12, repetition=0.25, first_answer=0.6, first_right=None)


def sample(index: int = 0, verdict: Verdict = "right", **changes: Any) -> Sample:
    made = Sample(
        task="gsm8k",
        problem=f"p{index}",
        index=0,
        seed=index,
        question="q",
        expected="42",
        verdict=verdict,
        answer="42" if verdict == "right" else None,
        error="out of memory" if verdict == "error" else None,
        finish_reason="stop",
        prompt_tokens=50,
        output_tokens=400 + 37 * index,
        thinking_tokens=350 + 37 * index,
        answer_tokens=50,
        closed=True,
        seconds=2.5,
        loop=None,
        anatomy=ANATOMY,
        digest="d",
        text="so \\boxed{42}",
        thinking="Let me see.\n\nWait.",
    )
    return replace(made, **changes)


def looping(index: int) -> Sample:
    loop = Loop(start=300, period=7)
    limit = {"finish_reason": "length", "output_tokens": 1024, "thinking_tokens": 1024}
    return sample(index, "unanswered", loop=loop, **limit)


SAMPLES = (
    *(sample(i, "right" if i % 3 else "wrong") for i in range(8)),
    looping(8),
    sample(9, "error", anatomy=None),
)

SUMMARY = Summary(
    problems=10,
    sample_count=10,
    right=5,
    accuracy=0.5556,
    accuracy_ci=(0.2667, 0.8112),
    errors=1,
    grader_errors=0,
    thinking_tokens_mean=12345.0,
    thinking_tokens_median=11222.0,
    thinking_tokens_p90=32111.0,
    answer_tokens_mean=321.0,
    answer_tokens_median=300.0,
    answer_tokens_p90=1999.0,
    never_answered_share=0.111,
    limit_share=0.112,
    unclosed_share=0.113,
    looped_share=0.114,
    loop_start_mean=30123.0,
    thoughts_mean=41.5,
    repetition_mean=0.253,
    first_answer_mean=0.617,
    first_right_mean=0.583,
    wrong_but_reached_share=0.25,
    wall_seconds=80.0,
    cpu_seconds=150.0,
    tokens_per_s=1234.0,
    seconds_per_correct=123.0,
    cpu_seconds_per_correct=2345.0,
    kv_byte_steps=1e12,
    kv_byte_seconds=1.5e11,
    kv_side_byte_seconds=1e9,
    kv_peak_bytes=123_400_000_000,
    kv_byte_seconds_per_correct=3.21e10,
    preemptions=0,
    tokens_by_role={"main": 9000},
)

SERVER = replace(
    SUMMARY,
    unclosed_share=None,
    looped_share=None,
    loop_start_mean=None,
    first_answer_mean=None,
    first_right_mean=None,
    wrong_but_reached_share=None,
    cpu_seconds=None,
    cpu_seconds_per_correct=None,
    kv_byte_steps=None,
    kv_byte_seconds=None,
    kv_side_byte_seconds=None,
    kv_peak_bytes=None,
    kv_byte_seconds_per_correct=None,
    preemptions=None,
    tokens_by_role={},
)
"""Of a backend that only answers."""


def run(
    name: str = "full",
    summary: Summary = SUMMARY,
    samples: Sequence[Sample] = SAMPLES,
    tasks: Sequence[str] = ("gsm8k",),
) -> Run:
    return Run(
        name=name,
        chain_rule="tokens between the thinking markers",
        settings={"model": "tiny", "max_tokens": 1024, "sampling": {"temperature": 0.6}},
        environment={"cpu": "some CPU", "torch": "2.13.0"},
        summary=summary,
        tasks=dict.fromkeys(tasks, summary),
        samples=tuple(replace(s, task=task) for task in tasks for s in samples),
    )


def comparison(base: Run, other: Run) -> Comparison:
    ratio = Ratio(pairs=180, ratio=1.234, ci=(1.102, 1.401))
    tasks = tuple(
        TaskComparison(
            task=task,
            problems=196,
            pairs=196,
            unpaired=4,
            base_accuracy=0.877,
            run_accuracy=0.866,
            accuracy_difference=-0.011,
            accuracy_difference_ci=(-0.042, 0.021),
            inflation=ratio,
            inflation_both_right=replace(ratio, pairs=150, ratio=1.09, ci=(1.01, 1.17)),
            inflation_below_limit=Ratio(pairs=0, ratio=None, ci=None),
            same_tokens=31,
            base_at_limit=3,
            run_at_limit=17,
            base_tokens_per_s=base.tasks[task].tokens_per_s,
            run_tokens_per_s=other.tasks[task].tokens_per_s,
            per_token_speedup=1.5,
            end_to_end_speedup=1.216,
            base=base.tasks[task],
            run=other.tasks[task],
        )
        for task in base.tasks
    )
    return Comparison(
        base_name=base.name,
        run_name=other.name,
        mismatches=(),
        tasks=tasks,
        inflation=1.235,
        inflation_ci=(1.101, 1.402),
        inflation_both_right=1.088,
        inflation_below_limit=None,
        accuracy_difference=-0.012,
        accuracy_difference_ci=(-0.043, 0.022),
        end_to_end_speedup=1.217,
    )
