"""Samples and runs made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.evaluation.records import Anatomy, Run, Sample, Usage
from bench.evaluation.summary import summarise

SETTINGS = {"model": "tiny", "max_tokens": 100, "seed": 0, "samples": 1, "temperature": 0.6}


def sample(problem: str = "p0", thinking_tokens: int = 10, **fields: Any) -> Sample:
    """A right answer with a closed chain, but for what is given."""
    defaults: dict[str, Any] = {
        "task": "sums",
        "index": 0,
        "seed": 0,
        "question": "q0",
        "expected": "8",
        "verdict": "right",
        "answer": "8",
        "error": None,
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "answer_tokens": 2,
        "closed": True,
        "seconds": 0.5,
        "loop": None,
        "anatomy": Anatomy(thoughts=2, repetition=0.0, first_answer=0.5, first_right=0.5),
        "digest": "d0",
        "text": "8",
        "thinking": "so 8",
    }
    output_tokens = thinking_tokens + fields.get("answer_tokens", 2)
    given = {"output_tokens": output_tokens, **fields}
    return Sample(**{**defaults, "problem": problem, "thinking_tokens": thinking_tokens, **given})


def run_of(
    samples: Sequence[Sample], name: str = "base", wall_seconds: float = 1.0, **settings: Any
) -> Run:
    """A finished run of them; every task took `wall_seconds`."""
    by_task: dict[str, list[Sample]] = {}
    for one in samples:
        by_task.setdefault(one.task, []).append(one)
    usage = Usage(wall_seconds=wall_seconds, ran_tokens={"main": 7})
    environment: Mapping[str, Any] = {"cpu": "a", "versions": {"torch": None}}
    return Run(
        name=name,
        chain_rule="up to the end marker",
        settings={**SETTINGS, **settings},
        environment=environment,
        summary=summarise(samples, [usage] * len(by_task)),
        tasks={task: summarise(own, [usage]) for task, own in by_task.items()},
        samples=tuple(samples),
    )
