"""Intervals: known values, the edges, and how often they cover what is true."""

from __future__ import annotations

import numpy as np
import pytest

from bench.evaluation.intervals import (
    accuracy_interval,
    mean_of_differences_interval,
    mean_of_ratios_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3, and the three below
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0),  # mirrored
    ],
)
def test_one_sample_a_problem_is_wilson(right: int, trials: int, low: float, high: float) -> None:
    accuracy, interval = accuracy_interval([1.0] * right + [0.0] * (trials - right), trials)
    assert accuracy == pytest.approx(right / trials)
    assert interval == pytest.approx((low, high), abs=6e-5)


def test_more_samples_count_as_far_as_they_differ() -> None:
    """Samples that all agree say no more than one; those that vary freely say as much as all."""
    agreeing = [1.0] * 30 + [0.0] * 20
    assert accuracy_interval(agreeing, 200) == (0.6, wilson(0.6, 50))
    assert accuracy_interval([0.5] * 50, 200) == (0.5, wilson(0.5, 200))
    between = [1.0] * 10 + [0.75] * 15 + [0.5] * 10 + [0.25] * 15
    low, high = accuracy_interval(between, 200)[1]
    accuracy = float(np.mean(between))
    most, least = wilson(accuracy, 50), wilson(accuracy, 200)
    assert most[0] < low < least[0]
    assert least[1] < high < most[1]


def test_where_the_variance_cannot_be_told_problems_count() -> None:
    assert accuracy_interval([1.0] * 9, 36) == (1.0, wilson(1.0, 9))
    assert accuracy_interval([0.0] * 9, 36) == (0.0, wilson(0.0, 9))
    assert accuracy_interval([0.25], 4) == (0.25, wilson(0.25, 1))
    assert accuracy_interval([], 0) == (0.0, (0.0, 1.0))


@pytest.mark.parametrize(("means", "samples", "field"), [([0.5] * 3, 2, "samples"), ([2], 2, "me")])
def test_bad_input_is_named(means: list[float], samples: int, field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        accuracy_interval(means, samples)


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_coverage_of_independent_samples(chance: float) -> None:
    generator = np.random.default_rng(0)
    means = generator.binomial(1, chance, (1000, 120)).astype(float)
    intervals = np.array([accuracy_interval(row, 120)[1] for row in means.tolist()])
    covered = ((intervals[:, 0] <= chance) & (chance <= intervals[:, 1])).mean()
    assert 0.93 <= covered <= 0.975


@pytest.mark.parametrize("shape", [(0.3, 0.3), (1, 1), (4, 1), (40, 40)])
def test_coverage_of_clustered_samples(shape: tuple[float, float]) -> None:
    """Four samples of each problem, problems that are nearly all or nothing to nearly alike."""
    generator = np.random.default_rng(1)
    chances = generator.beta(*shape, (1000, 100))
    means = generator.binomial(4, chances) / 4
    expected = shape[0] / sum(shape)
    intervals = np.array([accuracy_interval(row, 400)[1] for row in means.tolist()])
    covered = ((intervals[:, 0] <= expected) & (expected <= intervals[:, 1])).mean()
    assert 0.93 <= covered <= 0.975


def test_samples_taken_for_independent_would_not_cover() -> None:
    """What the design effect is for: the case above is one where it matters."""
    generator = np.random.default_rng(1)
    means = generator.binomial(4, generator.beta(0.3, 0.3, (1000, 100))) / 4
    intervals = np.array([wilson(row.mean(), 400) for row in means])
    covered = ((intervals[:, 0] <= 0.5) & (intervals[:, 1] >= 0.5)).mean()
    assert covered < 0.8


@pytest.fixture
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.evaluation.intervals.DRAWS", 2000)


@pytest.mark.usefixtures("_fewer_draws")
def test_bootstrap_covers_a_known_difference() -> None:
    generator = np.random.default_rng(2)
    differences = generator.choice([-1.0, 0.0, 1.0], (80, 50), p=[0.25, 0.6, 0.15])
    intervals = [mean_of_differences_interval([row]) for row in differences]
    assert sum(low <= -0.1 <= high for low, high in intervals) >= 70
    far = [not low <= -0.5 <= high for low, high in intervals]
    assert sum(far) >= 75


@pytest.mark.usefixtures("_fewer_draws")
@pytest.mark.parametrize("problems", [8, 20, 40])
def test_runs_that_mostly_agree_get_no_point(problems: int) -> None:
    """The usual comparison: one verdict in 14 differs, and few samples see it."""
    generator = np.random.default_rng(problems)
    shape = (100, problems)
    differences = generator.choice([-1.0, 0.0, 1.0], shape, p=[0.06, 0.93, 0.01])
    intervals = [mean_of_differences_interval([row]) for row in differences]
    assert sum(low <= -0.05 <= high for low, high in intervals) >= 90
    same_low, same_high = mean_of_differences_interval([np.zeros(problems)])
    assert same_low < 0 < same_high
    assert same_high - same_low < 6 / problems


@pytest.mark.usefixtures("_fewer_draws")
def test_bootstrap_covers_a_known_ratio() -> None:
    """Lengths with a long tail, and a run that is noisily a fifth longer."""
    generator = np.random.default_rng(3)
    base = generator.lognormal(6, 0.5, (80, 50))
    run = base * 1.2 * generator.lognormal(-0.045, 0.3, base.shape)  # its mean is 1
    intervals = [
        mean_of_ratios_interval([np.stack(rows, 1)]) for rows in zip(run, base, strict=True)
    ]
    assert sum(low <= 1.2 <= high for low, high in filter(None, intervals)) >= 70
    assert sum(high < 1.5 for _, high in filter(None, intervals)) >= 75


def test_bootstrap_is_deterministic_and_bounded_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(4).random(30)
    first = mean_of_differences_interval([values])
    assert mean_of_differences_interval([values]) == first
    monkeypatch.setattr("bench.evaluation.intervals._CHUNK_CELLS", 1000)
    assert mean_of_differences_interval([values]) == first


def test_tasks_are_drawn_apart() -> None:
    """Two alike tasks, drawn alike, would vary as one does; apart they vary less."""
    values = np.random.default_rng(5).random(40)
    one, two = (
        mean_of_differences_interval([values]),
        mean_of_differences_interval([values, values]),
    )
    assert (two[1] - two[0]) / (one[1] - one[0]) == pytest.approx(0.5**0.5, abs=0.05)


def test_bootstrap_of_too_little() -> None:
    assert mean_of_differences_interval([]) == (-1.0, 1.0)
    assert mean_of_ratios_interval([[[1.0, 2.0]]]) is None
    assert mean_of_ratios_interval([[[1.0, 0.0], [2.0, 0.0]]]) is None
    interval = mean_of_ratios_interval([[[1.0, 0.0], [2.0, 1.0]]])  # a quarter of draws undefined
    assert interval == (2.0, 3.0)
