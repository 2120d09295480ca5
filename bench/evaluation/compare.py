"""A run beside a base run, sample by sample: accuracy lost, and the CoT token inflation ratio.

CTIR (arXiv 2606.25519): what a cheaper model saves a token it can spend on more tokens. A task's
ratio is the run's mean thinking tokens over the base's, on pairs of samples graded in both, and
the overall one is the mean of the tasks' ratios. Ours: the pairing; the same ratio on pairs that
both got right, and on pairs below the limit, since a cap pulls the ratio towards 1; intervals that
draw problems with all their samples (intervals.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, geometric_mean

import numpy as np

from bench.evaluation.intervals import (
    Array,
    mean_of_differences_interval,
    mean_of_ratios_interval,
)
from bench.evaluation.mismatch import mismatches
from bench.evaluation.records import Comparison, Interval, Ratio, Run, Sample, TaskComparison
from bench.evaluation.summary import summarise

Pair = tuple[Sample, Sample]  # of base and run


def compare(base: Run, run: Run) -> Comparison:
    """The tasks, in base's order, of which both runs graded some same sample.

    A mean over tasks is over those that have the figure.
    ValueError: no pair at all, with what differs. What makes a comparison unfair but possible is
    told by `mismatches`.
    """
    pairs = _pairs_by_task(base, run)
    if not pairs:
        raise ValueError(
            f"{base.name} and {run.name} share no graded sample: "
            + "; ".join(mismatches(base, run))
        )
    tasks = tuple(_compare_task(task, pairs[task], base, run) for task in pairs)
    return Comparison(
        base_name=base.name,
        run_name=run.name,
        mismatches=tuple(mismatches(base, run)),
        tasks=tasks,
        inflation=_mean_told(task.inflation.ratio for task in tasks),
        inflation_ci=mean_of_ratios_interval(_told_sums(pairs.values())),
        inflation_both_right=_mean_told(task.inflation_both_right.ratio for task in tasks),
        inflation_below_limit=_mean_told(task.inflation_below_limit.ratio for task in tasks),
        accuracy_difference=fmean(task.accuracy_difference for task in tasks),
        accuracy_difference_ci=_difference_interval(list(pairs.values())),
        end_to_end_speedup=_geometric_mean_told(task.end_to_end_speedup for task in tasks),
    )


def _pairs_by_task(base: Run, run: Run) -> dict[str, list[Pair]]:
    others = {sample.key: sample for sample in run.samples}
    pairs: dict[str, list[Pair]] = {}
    for sample in base.samples:
        other = others.get(sample.key)
        if other is not None and sample.pairs_with(other):
            pairs.setdefault(sample.task, []).append((sample, other))
    return {task: pairs[task] for task in base.tasks if task in pairs}


def _compare_task(task: str, pairs: Sequence[Pair], base: Run, run: Run) -> TaskComparison:
    base_scores, run_scores = _scores(pairs).T
    inflation = _ratio(pairs)
    base_speed, run_speed = base.tasks[task].tokens_per_s, run.tasks[task].tokens_per_s
    speedup = _quotient(run_speed or None, base_speed)
    return TaskComparison(
        task=task,
        problems=len(base_scores),
        pairs=len(pairs),
        unpaired=_graded(base, task) + _graded(run, task) - 2 * len(pairs),
        base_accuracy=float(base_scores.mean()),
        run_accuracy=float(run_scores.mean()),
        accuracy_difference=float((run_scores - base_scores).mean()),
        accuracy_difference_ci=_difference_interval([pairs]),
        inflation=inflation,
        inflation_both_right=_ratio([(a, b) for a, b in pairs if a.right and b.right]),
        inflation_below_limit=_ratio([(a, b) for a, b in pairs if not (a.at_limit or b.at_limit)]),
        same_tokens=_same_tokens(pairs),
        base_at_limit=sum(a.at_limit for a, _ in pairs),
        run_at_limit=sum(b.at_limit for _, b in pairs),
        per_token_speedup=speedup,
        end_to_end_speedup=_quotient(speedup, inflation.ratio),
        base_tokens_per_s=base_speed,
        run_tokens_per_s=run_speed,
        base=summarise([a for a, _ in pairs], []),
        run=summarise([b for _, b in pairs], []),
    )


def _graded(run: Run, task: str) -> int:
    return sum(sample.graded for sample in run.samples if sample.task == task)


def _same_tokens(pairs: Sequence[Pair]) -> int | None:
    if any(a.digest is None or b.digest is None for a, b in pairs):
        return None
    return sum(a.digest == b.digest for a, b in pairs)


def _by_problem(pairs: Sequence[Pair]) -> list[list[Pair]]:
    problems: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        problems[pair[0].problem].append(pair)
    return list(problems.values())


def _scores(pairs: Sequence[Pair]) -> Array:
    """Each problem's share of right samples in base and run: [problems, 2]."""
    problems = _by_problem(pairs)
    return np.array(
        [[fmean(a.right for a, _ in own), fmean(b.right for _, b in own)] for own in problems]
    )


def _difference_interval(tasks: Sequence[Sequence[Pair]]) -> Interval:
    scores = [_scores(pairs) for pairs in tasks]
    return mean_of_differences_interval([own[:, 1] - own[:, 0] for own in scores])


def _sums(pairs: Sequence[Pair]) -> Array:
    """Each problem's thinking tokens in run and base: [problems, 2]."""
    tokens = [
        (sum(b.thinking_tokens for _, b in own), sum(a.thinking_tokens for a, _ in own))
        for own in _by_problem(pairs)
    ]
    return np.array(tokens, dtype=np.float64).reshape(-1, 2)


def _told_sums(tasks: Iterable[Sequence[Pair]]) -> list[Array]:
    """Of the tasks that have a ratio."""
    return [sums for sums in map(_sums, tasks) if sums[:, 1].any()]


def _ratio(pairs: Sequence[Pair]) -> Ratio:
    sums = _sums(pairs)
    run_tokens, base_tokens = sums.sum(axis=0).tolist()
    ratio = _quotient(run_tokens, base_tokens)
    ci = None if ratio is None else mean_of_ratios_interval([sums])
    return Ratio(pairs=len(pairs), ratio=ratio, ci=ci)


def _quotient(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def _mean_told(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return fmean(told) if told else None


def _geometric_mean_told(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value]
    return geometric_mean(told) if told else None
