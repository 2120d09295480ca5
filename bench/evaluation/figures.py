"""Every figure of the table and the report once: its name, what it means, how it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from bench.evaluation import units
from bench.evaluation.records import Comparison, Ratio, Run, Summary, TaskComparison


class Figure(NamedTuple):
    """A figure of one Summary."""

    name: str
    meaning: str
    show: Callable[[Summary], str]


class Compared(NamedTuple):
    """A figure of a run beside its base. `overall` shows it over all tasks."""

    name: str
    meaning: str
    show: Callable[[TaskComparison], str]
    overall: Callable[[Comparison], str] = lambda comparison: ""


ENOUGH_PROBLEMS = 20
"""With fewer, a bootstrap's interval is too narrow (intervals.py)."""


def few_problems(comparison: Comparison) -> str | None:
    """A sentence about the tasks whose intervals are too narrow; None if there are none."""
    few = [t for t in comparison.tasks if t.problems < ENOUGH_PROBLEMS]
    if not few:
        return None
    named = ", ".join(f"{t.task} ({t.problems})" for t in few)
    return (
        f"Fewer than {ENOUGH_PROBLEMS} problems have pairs in {named}: intervals of ratios are too "
        "narrow there (with 15 problems, 95 % ones cover about 90 %)."
    )


def failures(run: Run) -> list[tuple[str, int]]:
    """What went wrong with samples that aren't graded, and how often; the commonest ten."""
    messages = Counter(f"{s.verdict}: {s.error}" for s in run.samples if not s.graded)
    return messages.most_common(10)


def graded(summary: Summary) -> int:
    """Samples that count as right or wrong."""
    return summary.sample_count - summary.grader_errors


def _accuracy(s: Summary) -> str:
    return units.percent_range(s.accuracy, s.accuracy_ci) if graded(s) else units.NONE


ACCURACY = (
    Figure(
        "accuracy (95 % interval)",
        "Right answers among the graded ones; a problem's samples are averaged first.",
        _accuracy,
    ),
    Figure(
        "right",
        "Right samples, of those graded.",
        lambda s: f"{s.right:,} of {graded(s):,}",
    ),
    Figure("problems", "Different questions.", lambda s: f"{s.problems:,}"),
    Figure(
        "crashed",
        "Generation failed. Counts as neither right nor wrong.",
        lambda s: f"{s.errors:,}",
    ),
    Figure(
        "grader failed",
        "The answer couldn't be graded. Counts as neither right nor wrong.",
        lambda s: f"{s.grader_errors:,}",
    ),
)

LENGTH = (
    Figure(
        "chain, mean / median / p90",
        "Tokens of the chain of thought; nine of ten chains are no longer than p90.",
        lambda s: units.counts(
            (s.thinking_tokens_mean, s.thinking_tokens_median, s.thinking_tokens_p90), "tokens"
        ),
    ),
    Figure(
        "answer, mean / median / p90",
        "Tokens after the chain.",
        lambda s: units.counts(
            (s.answer_tokens_mean, s.answer_tokens_median, s.answer_tokens_p90), "tokens"
        ),
    ),
)

UNANSWERED = Figure(
    "never answered",
    "No boxed answer was given. Counts as wrong.",
    lambda s: units.percent(s.never_answered_share),
)
LOOPED = Figure(
    "looped",
    "The output ends in an exact cycle; n/a where the backend doesn't tell token ids.",
    lambda s: units.percent(s.looped_share),
)

ENDINGS = (
    UNANSWERED,
    Figure("hit the limit", "Cut at the token limit.", lambda s: units.percent(s.limit_share)),
    Figure(
        "unclosed",
        "The chain's end marker never came; n/a for a model without markers.",
        lambda s: units.percent(s.unclosed_share),
    ),
    LOOPED,
    Figure(
        "loop starts after",
        "Mean output tokens before the cycle, of those that looped.",
        lambda s: units.count(s.loop_start_mean, "tokens"),
    ),
)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


WORK = (
    Figure(
        "wall clock",
        "Seconds of the task in the backend, all samples together.",
        lambda s: units.amount(s.wall_seconds, "s"),
    ),
    Figure("CPU time", "Seconds of all cores.", lambda s: units.amount(s.cpu_seconds, "s")),
    Figure(
        "tokens run",
        "What each role's model read and wrote, prompts and what was computed again included.",
        lambda s: ", ".join(f"{role} {ran:,}" for role, ran in s.tokens_by_role.items()),
    ),
    Figure(
        "KV memory-time",
        "KV bytes held through each step, summed over steps.",
        lambda s: units.gigabytes(s.kv_byte_steps, "GB steps"),
    ),
    Figure(
        "side state",
        "The part of the KV memory-time that tables and remembered queries take.",
        lambda s: units.percent(_share(s.kv_side_byte_seconds, s.kv_byte_seconds)),
    ),
)

SPEED = Figure(
    "speed", "Output tokens by wall clock.", lambda s: units.amount(s.tokens_per_s, "tok/s")
)

COST = (
    SPEED,
    Figure(
        "time per correct",
        "Wall clock of the task over its right answers.",
        lambda s: units.amount(s.seconds_per_correct, "s"),
    ),
    Figure(
        "CPU time per correct",
        "Seconds of all cores over right answers; n/a where the backend is another process.",
        lambda s: units.amount(s.cpu_seconds_per_correct, "s"),
    ),
    Figure(
        "KV per correct",
        "KV memory held, integrated over time, over right answers.",
        lambda s: units.gigabytes(s.kv_byte_seconds_per_correct, "GB·s"),
    ),
    Figure(
        "KV peak",
        "The most that the cache held at once, side state included.",
        lambda s: units.gigabytes(s.kv_peak_bytes),
    ),
)

ANATOMY = (
    Figure(
        "thoughts", "Thoughts in a chain, mean.", lambda s: units.amount(s.thoughts_mean, "a chain")
    ),
    Figure(
        "repetition",
        "Thoughts that largely repeat an earlier one.",
        lambda s: units.percent(s.repetition_mean),
    ),
    Figure(
        "final answer first seen",
        "How far into the chain the answer that was given first appears, mean: what follows is "
        "checking, or waste.",
        lambda s: units.percent(s.first_answer_mean),
    ),
    Figure(
        "expected answer first seen",
        "How far into the chain the expected answer first appears, mean.",
        lambda s: units.percent(s.first_right_mean),
    ),
    Figure(
        "wrong but reached",
        "Of the wrong ones: the expected answer was in the chain.",
        lambda s: units.percent(s.wrong_but_reached_share),
    ),
)

GROUPS = {
    "Accuracy": ACCURACY,
    "Length": LENGTH,
    "How outputs end": ENDINGS,
    "Work": WORK,
    "Cost": COST,
}


def _beside(figure: Figure) -> Callable[[TaskComparison], str]:
    return lambda task: f"{figure.show(task.base)}\n→ {figure.show(task.run)}"


def _ratio(ratio: Ratio) -> str:
    shown = units.times_range(ratio.ratio, ratio.ci).replace(" (", "\n(")
    return f"{shown}\n{ratio.pairs:,} pairs"


COMPARED_ACCURACY = (
    Compared(
        "pairs",
        "Samples of the same problem and seed that both runs graded. Everything here is of these, "
        "but speed, which is of each run's whole task.",
        lambda t: f"{t.pairs:,} (+ {t.unpaired:,} unpaired)",
    ),
    Compared(
        "accuracy, base → run",
        "On the pairs.",
        lambda t: f"{units.percent(t.base_accuracy)} → {units.percent(t.run_accuracy)}",
    ),
    Compared(
        "difference (95 % interval)",
        "Run minus base, in percentage points. An interval that holds 0 is no "
        "evidence of a difference.",
        lambda t: units.points_range(t.accuracy_difference, t.accuracy_difference_ci),
        lambda c: units.points_range(c.accuracy_difference, c.accuracy_difference_ci),
    ),
)

COMPARED_LENGTH = (
    Compared(
        "chain inflation",
        "Mean chain tokens of the run over those of the base: 1.20x means chains a fifth longer. "
        "Over all tasks it is the mean of the tasks' ratios.",
        lambda t: _ratio(t.inflation),
        lambda c: units.times_range(c.inflation, c.inflation_ci).replace(" (", "\n("),
    ),
    Compared(
        "both right",
        "Chain inflation of the pairs where both runs answered right: longer chains that only "
        "came with errors drop out.",
        lambda t: _ratio(t.inflation_both_right),
        lambda c: units.times(c.inflation_both_right),
    ),
    Compared(
        "both below the limit",
        "Chain inflation of the pairs where neither was cut: chains cut at the limit hide how "
        "long they would have been.",
        lambda t: _ratio(t.inflation_below_limit),
        lambda c: units.times(c.inflation_below_limit),
    ),
)

COMPARED_ENDINGS = (
    Compared(
        "same tokens",
        "Pairs whose outputs are the same, token for token.",
        lambda t: units.NONE if t.same_tokens is None else f"{t.same_tokens:,} of {t.pairs:,}",
    ),
    Compared(
        "hit the limit",
        "Outputs of the pairs that were cut, base → run.",
        lambda t: f"{t.base_at_limit:,} → {t.run_at_limit:,}",
    ),
    Compared("looped, base → run", LOOPED.meaning, _beside(LOOPED)),
    Compared("never answered, base → run", UNANSWERED.meaning, _beside(UNANSWERED)),
)

COMPARED_SPEED = (
    Compared(
        "speed, base → run",
        SPEED.meaning,
        lambda t: (
            f"{units.amount(t.base_tokens_per_s, 'tok/s')}\n"
            f"→ {units.amount(t.run_tokens_per_s, 'tok/s')}"
        ),
    ),
    Compared(
        "per token",
        "Speed of the run over the base's: what each token gains.",
        lambda t: units.times(t.per_token_speedup),
    ),
    Compared(
        "end to end",
        "The gain per token over chain inflation: what an answer gains. Below 1.00x the longer "
        "chains cost more than faster tokens save. Over all tasks: the geometric mean.",
        lambda t: units.times(t.end_to_end_speedup),
        lambda c: units.times(c.end_to_end_speedup),
    ),
)

COMPARED_ANATOMY = tuple(
    Compared(figure.name, figure.meaning, _beside(figure)) for figure in ANATOMY[:4]
)

COMPARED_GROUPS = {
    "Accuracy": COMPARED_ACCURACY,
    "Chain length": COMPARED_LENGTH,
    "How outputs end": COMPARED_ENDINGS,
    "Speed": COMPARED_SPEED,
    "Trace anatomy, base → run": COMPARED_ANATOMY,
}
