"""How sure a figure is: 95 % intervals of an accuracy, a paired difference and a ratio of means.

The problems are taken for a sample of all problems of their kind; the samples of one problem are
not independent, so it is problems that are counted, and resampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bench.evaluation.records import Interval

DRAWS = 10_000
SEED = 20_250_606
_Z = 1.959963984540054  # of a standard normal, 95 % lie within
_CHUNK_CELLS = 1_000_000  # indices held at a time

Array = NDArray[np.float64]


def accuracy_interval(means: Sequence[float], samples: int) -> tuple[float, Interval]:
    """pass@1, the mean of the problems' mean scores `means`, with Wilson's interval.

    Wilson's number of trials is the effective number of samples: that at which independent trials
    would vary as the problems' means do (the design effect), at least the problems and at most
    `samples`, all samples together. So with one sample a problem the interval is Wilson's own.
    Where the variance can't be told (one problem; all right; all wrong) the problems alone count.
    No problems: 0.0, and (0, 1).
    """
    scores = np.asarray(means, dtype=np.float64)
    problems = len(scores)
    if problems == 0:
        return 0.0, (0.0, 1.0)
    if samples < problems:
        raise ValueError(f"samples must be at least the {problems} problems, is {samples}")
    if not ((scores >= 0) & (scores <= 1)).all():
        raise ValueError("means must be between 0 and 1: shares of right samples")
    accuracy = float(scores.mean())
    return accuracy, wilson(accuracy, _effective_samples(scores, samples))


def _effective_samples(scores: Array, samples: int) -> float:
    problems, accuracy = len(scores), float(scores.mean())
    alone = accuracy * (1 - accuracy)  # variance of one trial
    if problems == 1 or alone == 0:
        return problems
    between = float(scores.var(ddof=1)) / problems
    effective = alone / between if between > 0 else samples
    return min(max(effective, problems), samples)


def wilson(rate: float, trials: float) -> Interval:
    """Wilson's score interval of a rate seen in `trials`, which need not be whole."""
    weight = _Z**2 / trials
    centre = (rate + weight / 2) / (1 + weight)
    half = _Z * np.sqrt(rate * (1 - rate) / trials + weight / (4 * trials)) / (1 + weight)
    low = 0.0 if rate == 0 else max(0.0, float(centre - half))
    high = 1.0 if rate == 1 else min(1.0, float(centre + half))
    return low, high


def mean_of_differences_interval(tasks: Sequence[ArrayLike]) -> Interval:
    """Of the mean over tasks of each task's mean over its problems' score differences [problems],
    each from -1 to 1.

    A percentile bootstrap: problems are drawn again within each task, each task on its own, with a
    fixed seed, from the task's problems and two made-up ones more, +1 and -1 (as Agresti and Min
    add to a paired table). Without them runs that mostly agree would get a point or nearly one:
    with one verdict in 14 differing, nominal 95 % covered 37 % at 8 problems and 87 % at 40. No
    task: (-1, 1).
    """
    values = [np.append(np.asarray(task, dtype=np.float64), (1.0, -1.0))[:, None] for task in tasks]
    if not values:
        return -1.0, 1.0
    draws = [_resampled_sums(task, number)[:, 0] / len(task) for number, task in enumerate(values)]
    return _percentiles(np.mean(draws, axis=0))


def mean_of_ratios_interval(tasks: Sequence[ArrayLike]) -> Interval | None:
    """Of the mean over tasks of each task's ratio of means; a task is [problems, 2] sums over the
    problem's samples: numerator, denominator.

    A percentile bootstrap, drawn as above but from the problems alone: with few of them too narrow
    (nominal 95 % cover about 90 % with 15). Draws in which a denominator is 0 are left out. None:
    no draw is left, no task, or one with a single problem, whose spread can't be told.
    """
    values = [np.asarray(task, dtype=np.float64) for task in tasks]
    if not values or min(map(len, values)) < 2:
        return None
    sums = np.stack([_resampled_sums(task, number) for number, task in enumerate(values)])
    sums = sums[:, (sums[..., 1] > 0).all(axis=0)]  # [tasks, draws, 2]
    if sums.shape[1] == 0:
        return None
    return _percentiles((sums[..., 0] / sums[..., 1]).mean(axis=0))


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value of a paired table: how likely so uneven a split is, or a more
    uneven one, if each of the verdicts that changed was as likely to change either way."""
    changed = gained + lost
    tail = sum(comb(changed, k) for k in range(min(gained, lost) + 1)) / 2.0**changed
    return min(1.0, 2 * tail)


def _resampled_sums(values: Array, task: int) -> Array:
    """Sums over as many problems as there are, drawn with replacement: [DRAWS, columns]."""
    return np.concatenate(
        [
            np.stack([column[chosen].sum(axis=1) for column in values.T], axis=1)
            for chosen in _draws(len(values), task)
        ]
    )


def _draws(problems: int, task: int) -> Iterator[NDArray[np.int64]]:
    """Indices [some of DRAWS, problems]. Tasks differ, or equal sizes would be drawn alike."""
    generator = np.random.default_rng([SEED, task])
    at_once = max(1, _CHUNK_CELLS // problems)
    for start in range(0, DRAWS, at_once):
        yield generator.integers(0, problems, (min(at_once, DRAWS - start), problems))


def _percentiles(draws: Array) -> Interval:
    low, high = np.percentile(draws, (2.5, 97.5))
    return float(low), float(high)
