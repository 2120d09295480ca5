"""Samples and what they took -> the figures of a task or a run. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bench.evaluation.intervals import accuracy_interval
from bench.evaluation.records import Anatomy, Interval, Sample, Summary, Usage


def summarise(samples: Sequence[Sample], usages: Sequence[Usage]) -> Summary:
    """The figures of samples, of one task or several pooled, that took `usages` together.

    A crashed sample (verdict "error") counts in `errors` and nowhere else; what the grader failed
    on counts in every figure but accuracy, `right` and the wrong ones. Nothing graded: accuracy 0.0
    with the interval (0, 1). Nothing but crashes: the other figures are 0 or None too.
    ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples to summarise: the task has no problems, or none was run")
    ran = [sample for sample in samples if sample.verdict != "error"]
    right = sum(sample.right for sample in ran)
    accuracy, accuracy_ci = graded_accuracy(ran)
    thinking = [sample.thinking_tokens for sample in ran]
    answers = [sample.answer_tokens for sample in ran]
    return Summary(
        problems=len({(sample.task, sample.problem) for sample in ran}),
        sample_count=len(ran),
        right=right,
        accuracy=accuracy,
        accuracy_ci=accuracy_ci,
        errors=len(samples) - len(ran),
        grader_errors=sum(sample.verdict == "grader_error" for sample in ran),
        thinking_tokens_mean=_mean(thinking) or 0.0,
        thinking_tokens_median=_percentile(thinking, 50),
        thinking_tokens_p90=_percentile(thinking, 90),
        answer_tokens_mean=_mean(answers) or 0.0,
        answer_tokens_median=_percentile(answers, 50),
        answer_tokens_p90=_percentile(answers, 90),
        never_answered_share=_mean(s.verdict == "unanswered" for s in ran) or 0.0,
        limit_share=_mean(sample.at_limit for sample in ran) or 0.0,
        unclosed_share=_mean(not s.closed for s in ran if s.closed is not None),
        # without its ids (and so its digest) nobody looked for a loop
        looped_share=_mean(s.loop is not None for s in ran if s.digest is not None),
        loop_start_mean=_mean(s.loop.start for s in ran if s.loop is not None),
        **_chains(ran),
        **_costs(usages, sum(sample.output_tokens for sample in ran), right),
    )


def graded_accuracy(samples: Iterable[Sample]) -> tuple[float, Interval]:
    """pass@1 of those that were graded, a problem's samples averaged first, with its interval."""
    by_problem: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
    for sample in samples:
        if sample.graded:
            by_problem[sample.task, sample.problem].append(sample.right)
    means = [sum(right) / len(right) for right in by_problem.values()]
    return accuracy_interval(means, sum(map(len, by_problem.values())))


def _chains(ran: Sequence[Sample]) -> dict[str, Any]:
    anatomies = [sample.anatomy for sample in ran if sample.anatomy is not None]
    wrong = [sample.anatomy for sample in ran if sample.graded and not sample.right]
    firsts = [anatomy.first_answer for anatomy in anatomies]
    first_rights = [anatomy.first_right for anatomy in anatomies]
    return {
        "thoughts_mean": _mean(anatomy.thoughts for anatomy in anatomies) or 0.0,
        "repetition_mean": _mean(anatomy.repetition for anatomy in anatomies) or 0.0,
        "first_answer_mean": _mean(share for share in firsts if share is not None),
        "first_right_mean": _mean(share for share in first_rights if share is not None),
        "wrong_but_reached_share": _mean(_reached(anatomy) for anatomy in wrong),
    }


def _reached(anatomy: Anatomy | None) -> bool:
    return anatomy is not None and anatomy.first_right is not None


def _costs(usages: Sequence[Usage], output_tokens: int, right: int) -> dict[str, Any]:
    wall_seconds = sum((usage.wall_seconds for usage in usages), 0.0)
    cpu_seconds = _total(usage.cpu_seconds for usage in usages)
    kv_byte_seconds = _total(usage.kv_byte_seconds for usage in usages)
    roles: Counter[str] = Counter()
    for usage in usages:
        roles.update(usage.ran_tokens)
    return {
        "wall_seconds": wall_seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_s": output_tokens / wall_seconds if wall_seconds > 0 else 0.0,
        "seconds_per_correct": _per(wall_seconds, right),
        "cpu_seconds_per_correct": _per(cpu_seconds, right),
        "kv_byte_steps": _total(usage.kv_byte_steps for usage in usages),
        "kv_byte_seconds": kv_byte_seconds,
        "kv_side_byte_seconds": _total(usage.kv_side_byte_seconds for usage in usages),
        "kv_peak_bytes": _told(max, (usage.kv_peak_bytes for usage in usages)),
        "kv_byte_seconds_per_correct": _per(kv_byte_seconds, right),
        "preemptions": _total(usage.preemptions for usage in usages),
        "tokens_by_role": dict(roles),
    }


def _told(combine: Any, values: Iterable[float | None]) -> Any:
    """None where one of them, or all, weren't told."""
    told = list(values)
    return combine(told) if told and None not in told else None


def _total(values: Iterable[float | None]) -> Any:
    return _told(sum, values)


def _per(total: float | None, right: int) -> float | None:
    return None if total is None or right == 0 else total / right


def _mean(values: Iterable[float]) -> float | None:
    held = list(values)
    return sum(held) / len(held) if held else None


def _percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours; 0.0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0
