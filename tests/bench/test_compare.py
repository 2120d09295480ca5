"""Two runs side by side: the pairing, the ratios and what is unfair."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bench.evaluation.compare import compare
from bench.evaluation.mismatch import mismatches
from bench.evaluation.records import Sample
from tests.bench.samples import run_of, sample


def lengths(task: str, tokens: Sequence[int]) -> list[Sample]:
    return [sample(f"p{i}", count, task=task) for i, count in enumerate(tokens)]


def test_pairs_are_found_whatever_the_order() -> None:
    base = [sample(f"p{i}", 10 + i, index=j) for i in range(20) for j in range(2)]
    run = [replace(one, thinking_tokens=2 * one.thinking_tokens) for one in base]
    random.Random(0).shuffle(run)
    comparison = compare(run_of(base), run_of(run, "run"))
    (task,) = comparison.tasks
    assert (task.problems, task.pairs, task.unpaired) == (20, 40, 0)
    assert task.inflation.ratio == comparison.inflation == 2.0
    assert task.inflation.ci == comparison.inflation_ci == (2.0, 2.0)  # pair by pair the same


def test_only_what_both_graded_is_paired() -> None:
    base = [*lengths("sums", [10, 10, 10, 10, 5000]), sample("p9", 5000)]
    run = [
        *lengths("sums", [20, 30]),
        sample("p2", 5000, verdict="error", anatomy=None),
        sample("p3", 5000, verdict="grader_error"),
        sample("p4", 5000, index=1),
    ]
    (task,) = compare(run_of(base), run_of(run, "run")).tasks
    assert (task.pairs, task.inflation.pairs, task.inflation.ratio) == (2, 2, 2.5)
    assert task.unpaired == 4 + 1  # p2, p3, p4, p9 of base, and p4's other sample
    assert task.base.thinking_tokens_mean == 10  # of the pairs
    assert (task.base.wall_seconds, task.base_tokens_per_s > 0) == (0.0, True)


def test_accuracy_is_of_the_pairs_and_problems_weigh_alike() -> None:
    base = [sample("p0", index=i) for i in range(3)] + [sample("p1"), sample("p2")]
    run = [replace(one, verdict="wrong") for one in base[:3]] + [sample("p1")]
    (task,) = compare(run_of(base), run_of(run, "run")).tasks
    assert (task.base_accuracy, task.run_accuracy) == (1.0, 0.5)
    assert task.accuracy_difference == -0.5
    assert task.accuracy_difference_ci == (-1.0, 0.5)  # two problems tell next to nothing


def test_the_difference_is_paired() -> None:
    """Both are right on one half; unpaired the interval would be twenty points wide."""
    base = [sample(f"p{i}", verdict="right" if i < 100 else "wrong") for i in range(200)]
    run = [replace(one, verdict="wrong") if i < 10 else one for i, one in enumerate(base)]
    (task,) = compare(run_of(base), run_of(run, "run")).tasks
    low, high = task.accuracy_difference_ci
    assert task.accuracy_difference == -0.05
    assert -0.09 < low < -0.05 < high < -0.015


def test_overall_difference_is_the_mean_over_tasks() -> None:
    """A small task weighs as much as a large one, in the figure and in its interval."""
    base = [*lengths("small", [1] * 10), *lengths("large", [1] * 90)]
    run = [replace(one, verdict="wrong") if i < 5 else one for i, one in enumerate(base)]
    comparison = compare(run_of(base), run_of(run, "run"))
    small, _ = comparison.tasks
    assert (small.accuracy_difference, comparison.accuracy_difference) == (-0.5, -0.25)
    half = tuple(bound / 2 for bound in small.accuracy_difference_ci)
    assert comparison.accuracy_difference_ci == pytest.approx(half, abs=0.02)


def test_one_problem_tells_no_spread() -> None:
    base = [*lengths("one", [10]), *lengths("t", [10, 20])]
    comparison = compare(run_of(base), run_of(base, "run"))
    one = comparison.tasks[0]
    assert (one.inflation.ratio, one.inflation.ci) == (1.0, None)
    low, high = one.accuracy_difference_ci
    assert low < -0.5 < 0.5 < high
    assert (comparison.inflation, comparison.inflation_ci) == (1.0, None)


def test_overall_is_the_mean_of_ratios() -> None:
    """Pooled means would give (20 + 1000) / (10 + 1000), almost no inflation."""
    base = [*lengths("short", [10] * 3), *lengths("long", [1000] * 3)]
    run = [*lengths("short", [20] * 3), *lengths("long", [1000] * 3)]
    comparison = compare(run_of(base), run_of(run, "run"))
    assert [task.inflation.ratio for task in comparison.tasks] == [2.0, 1.0]
    assert comparison.inflation == 1.5


def test_of_a_task_it_is_the_ratio_of_means() -> None:
    """The mean of the pairs' ratios would be (4 + 1) / 2."""
    (task,) = compare(run_of(lengths("t", [10, 90])), run_of(lengths("t", [40, 90]), "run")).tasks
    assert task.inflation.ratio == 1.3


def test_capped_chains_are_set_apart() -> None:
    """The run's chains are twice as long, where the limit lets them."""
    true_lengths = np.random.default_rng(0).integers(20, 100, 60)
    base = lengths("t", true_lengths.tolist())
    run = [
        sample(f"p{i}", min(100, 2 * n), task="t", finish_reason="length" if n > 50 else "stop")
        for i, n in enumerate(true_lengths.tolist())
    ]
    comparison = compare(run_of(base), run_of(run, "run"))
    (task,) = comparison.tasks
    capped = int((true_lengths > 50).sum())
    assert (task.base_at_limit, task.run_at_limit) == (0, capped)
    assert task.inflation.ratio is not None
    assert task.inflation.ratio < 1.6
    assert task.inflation_below_limit.ratio == comparison.inflation_below_limit == 2.0
    assert task.inflation_below_limit.pairs == 60 - capped


def test_both_right_leaves_out_what_went_wrong() -> None:
    base = [sample("p0", 10), sample("p1", 10), sample("p2", 10, verdict="wrong")]
    run = [sample("p0", 15), sample("p1", 500, verdict="unanswered"), sample("p2", 900)]
    comparison = compare(run_of(base), run_of(run, "run"))
    (task,) = comparison.tasks
    assert (task.inflation_both_right.pairs, task.inflation_both_right.ratio) == (1, 1.5)
    assert task.inflation_both_right.ci is None  # of one problem
    assert comparison.inflation_both_right == 1.5


def test_ratios_that_do_not_exist() -> None:
    base = [*lengths("silent", [0, 0]), *lengths("t", [10, 10])]
    run = [*lengths("silent", [5, 5]), *lengths("t", [20, 20])]
    comparison = compare(run_of(base), run_of(run, "run"))
    silent = comparison.tasks[0]
    assert (silent.inflation.pairs, silent.inflation.ratio, silent.inflation.ci) == (2, None, None)
    assert silent.end_to_end_speedup is None
    assert (comparison.inflation, comparison.inflation_ci) == (2.0, (2.0, 2.0))
    wrong = [replace(one, verdict="wrong") for one in run]
    none_right = compare(run_of(base), run_of(wrong, "run"))
    assert none_right.tasks[1].inflation_both_right.pairs == 0
    assert none_right.inflation_both_right is None


def test_speed_ups() -> None:
    """Chains twice as long at four times the tokens a second, and as long at the same rate."""
    base = [*lengths("a", [98, 98]), *lengths("b", [98, 98])]
    run = [*lengths("a", [196, 196]), *lengths("b", [98, 98])]
    run_run = run_of(run, "run", wall_seconds=1.0)
    run_run = replace(
        run_run,
        tasks={
            "a": replace(run_run.tasks["a"], tokens_per_s=400.0),
            "b": replace(run_run.tasks["b"], tokens_per_s=200.0),
        },
    )
    comparison = compare(run_of(base), run_run)  # base: 200 tokens in a second
    assert [task.per_token_speedup for task in comparison.tasks] == [2.0, 1.0]
    assert [task.end_to_end_speedup for task in comparison.tasks] == [1.0, 1.0]
    faster = replace(run_run.tasks["a"], tokens_per_s=1600.0)
    comparison = compare(
        run_of(base), replace(run_run, tasks={"a": faster, "b": run_run.tasks["b"]})
    )
    assert comparison.end_to_end_speedup == pytest.approx(2.0)  # of 4 and 1
    untimed = compare(run_of(base), run_of(run, "run", wall_seconds=0.0))
    assert untimed.tasks[0].per_token_speedup is None
    assert untimed.end_to_end_speedup is None


def test_samples_of_a_problem_are_drawn_together() -> None:
    """Eight samples each of twelve problems that differ much say little more than one each."""
    generator = np.random.default_rng(1)
    factors = generator.lognormal(0, 0.8, 12)
    one = compare(
        run_of(lengths("t", [1000] * 12)),
        run_of(lengths("t", (1000 * factors).astype(int).tolist()), "run"),
    )
    keys = [(i, j) for i in range(12) for j in range(8)]
    eight = compare(
        run_of([sample(f"p{i}", 1000, index=j) for i, j in keys]),
        run_of([sample(f"p{i}", int(1000 * factors[i]), index=j) for i, j in keys], "run"),
    )
    assert eight.inflation_ci == pytest.approx(one.inflation_ci, rel=1e-9)


def test_tasks_of_one_run_alone_are_left_out_and_told() -> None:
    base, run = (
        run_of(lengths("a", [1, 2])),
        run_of([*lengths("a", [1, 2]), *lengths("b", [3])], "run"),
    )
    assert [task.task for task in compare(base, run).tasks] == ["a"]
    assert mismatches(base, run) == ["tasks only in run: b"]


def test_nothing_shared_says_what_differs() -> None:
    base = run_of(lengths("a", [1]))
    with pytest.raises(ValueError, match=r"tasks only in base: a; tasks only in run: b"):
        compare(base, run_of(lengths("b", [1]), "run"))
    crashed = run_of([sample(task="a", verdict="error", anatomy=None)], "run")
    with pytest.raises(ValueError, match=r"share no graded sample: a: no sample that both graded"):
        compare(base, crashed)


def test_what_is_compared_is_no_mismatch() -> None:
    base = run_of(lengths("a", [1, 2]), weights="bf16", kv_policy=None)
    run = run_of(lengths("a", [9, 9]), "run", weights="nvfp4", kv_policy="snapkv", model="other")
    assert mismatches(base, run) == []


def test_mismatches_are_told_in_words() -> None:
    base = run_of(lengths("a", [1, 2, 3]), top_k=20)
    other = [replace(one, expected="9") for one in lengths("a", [1, 2])]
    run = run_of([*other, sample("q", task="a")], "run", max_tokens=200, temperature=0.0)
    run = replace(run, chain_rule="all of the text")
    assert mismatches(base, run) == [
        "what counts as the chain: up to the end marker in base, all of the text in run",
        "max_tokens: 100 in base, 200 in run",
        "temperature: 0.6 in base, 0.0 in run",
        "top_k: 20 in base, not told in run",
        "a: 1 problem (p2) only in base",
        "a: 1 problem (q) only in run",
        "a: 2 problems (p0, p1) with another question or expected answer, not paired",
    ]


def test_another_question_under_the_same_id_is_no_pair() -> None:
    base = [sample("p0"), sample("p1")]
    run = run_of([sample("p0"), sample("p1", question="other")], "run")
    (task,) = compare(run_of(base), run).tasks
    assert (task.pairs, task.unpaired) == (1, 2)
    assert mismatches(run_of(base), run) == [
        "sums: 1 problem (p1) with another question or expected answer, not paired"
    ]


def test_speeds_of_different_places_do_not_compare() -> None:
    base, run = run_of([sample()]), run_of([sample()], "run", max_num_seqs=8)
    run = replace(run, environment={"cpu": "b", "threads": 4})
    assert mismatches(base, run) == [
        "speed: max_num_seqs: not told in base, 8 in run",
        "speed: cpu: a in base, b in run",
        "speed: threads: not told in base, 4 in run",
    ]


def test_same_tokens_are_counted() -> None:
    base = [sample("p0"), sample("p1"), sample("p2")]
    run = [sample("p0"), sample("p1", digest="other"), sample("p2")]
    (task,) = compare(run_of(base), run_of(run, "run")).tasks
    assert task.same_tokens == 2
    (task,) = compare(run_of(base), run_of([sample("p0", digest=None)], "run")).tasks
    assert task.same_tokens is None


def test_either_run_at_its_limit_sets_a_pair_apart() -> None:
    base = [sample("p0", 100, finish_reason="length"), sample("p1", 10)]
    run = [sample("p0", 50), sample("p1", 20)]
    (task,) = compare(run_of(base), run_of(run, "run")).tasks
    assert (task.base_at_limit, task.run_at_limit) == (1, 0)
    assert (task.inflation_below_limit.pairs, task.inflation_below_limit.ratio) == (1, 2.0)
