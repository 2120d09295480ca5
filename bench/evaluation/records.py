"""What travels through a measurement; no part but the engine backend needs torch.

A *task* is one benchmark of a run ("gsm8k"), a *sample* one answer to one of its problems. A sample
pairs with another run's by (task, problem, sample index): both then have the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine.scheduler.detect import Loop

Interval = tuple[float, float]
"""A 95 % confidence interval."""

Verdict = Literal["right", "wrong", "unanswered", "grader_error", "error"]
"""`unanswered` gave no answer where its grader looks and counts as wrong; `grader_error` (the
grader failed or ran out of time) and `error` (the problem crashed) count as neither, and are
shown."""

ANSWER_MARKER = "\\boxed{"

GRADED: frozenset[str] = frozenset(("right", "wrong", "unanswered"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question with its answer. `id` is unique in its task."""

    id: str
    task: str
    question: str  # as it is asked, without the instruction
    answer: str  # the final answer alone
    grader: str  # a name of graders.GRADERS
    entry: Mapping[str, Any] | None = None  # what a reasoning-gym scorer reads; JSON
    instruction: str | None = None  # how to answer; None: as most graders need it (prompts.py)


class Verdicted(NamedTuple):
    """What a grader says."""

    verdict: Verdict
    answer: str | None  # what was extracted
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVHeld:
    """What one sequence held of the main role's cache: cells of all heads of all layers, and bytes
    of their pages. `mean_*` are over the steps that it ran in, `side_bytes` is what isn't cells at
    the peak of those that are. `excess_cells`: beyond what the policy promises of any layer; at
    most 0 where that was kept."""

    peak_cells: int
    peak_bytes: int
    mean_cells: float
    mean_bytes: float
    side_bytes: int
    excess_cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What a backend made of one prompt.

    `text` is the answer (for models without markers all of the text), `thinking` what stood between
    markers. `closed` None: the model has no markers. `token_ids` None: the backend doesn't tell.
    """

    text: str
    thinking: str
    finish_reason: str  # "stop", "length", "abort" or "error"
    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int
    answer_tokens: int
    closed: bool | None
    seconds: float  # from submission to the last token
    token_ids: tuple[int, ...] | None = None
    error: str | None = None
    kv: KVHeld | None = None  # None: the backend doesn't tell

    @property
    def chain(self) -> str:
        """The chain's text."""
        return self.thinking if self.closed is not None else before_answer(self.text)


def before_answer(text: str) -> str:
    """The chain of a model without markers: what stands before its last answer, if it gave one."""
    before, found, after = text.rpartition(ANSWER_MARKER)
    return before if found else after


def failed(error: str, seconds: float = 0.0) -> Generation:
    """Nothing was made."""
    return Generation(
        text="",
        thinking="",
        finish_reason="error",
        prompt_tokens=0,
        output_tokens=0,
        thinking_tokens=0,
        answer_tokens=0,
        closed=None,
        seconds=seconds,
        error=error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """One chain taken apart (see anatomy.py)."""

    thoughts: int
    repetition: float  # share of thoughts that largely repeat an earlier one
    first_answer: float | None  # where the final answer first appears, as a share of the chain
    first_right: float | None  # where the expected answer first appears


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One graded answer: a line of a run's record."""

    task: str
    problem: str
    index: int  # of n samples of the problem
    seed: int
    question: str  # its digest: generators may ask otherwise under the same id
    expected: str
    verdict: Verdict
    answer: str | None
    error: str | None
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    thinking_tokens: int
    answer_tokens: int
    closed: bool | None
    seconds: float
    loop: Loop | None
    anatomy: Anatomy | None  # None where the problem crashed
    digest: str | None  # of the output's token ids
    text: str
    thinking: str
    kv: KVHeld | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.problem, self.index

    def pairs_with(self, other: Sample) -> bool:
        """Both are graded answers to the same question."""
        asked = [(s.key, s.question, s.expected) for s in (self, other)]
        return self.graded and other.graded and asked[0] == asked[1]

    @property
    def graded(self) -> bool:
        return self.verdict in GRADED

    @property
    def right(self) -> bool:
        return self.verdict == "right"

    @property
    def at_limit(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a task's samples took together. None: the backend can't tell.

    KV bytes hold everything: cells, and the side state of the slots in use.
    """

    wall_seconds: float = 0.0
    cpu_seconds: float | None = None
    steps: int | None = None
    kv_byte_steps: float | None = None
    kv_byte_seconds: float | None = None
    kv_side_byte_seconds: float | None = None  # the part that is side state
    kv_peak_bytes: int | None = None
    preemptions: int | None = None
    ran_tokens: Mapping[str, int] = field(default_factory=dict)  # by role, prompts too


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A task's figures, or a whole run's (samples of all tasks pooled).

    `sample_count` is of those that didn't crash; token figures and shares are over them, None where
    the backend or the model has no such thing. `right`, `accuracy` and its interval are over graded
    samples, a problem's samples averaged first.
    """

    problems: int
    sample_count: int
    right: int
    accuracy: float
    accuracy_ci: Interval
    errors: int
    grader_errors: int
    thinking_tokens_mean: float
    thinking_tokens_median: float
    thinking_tokens_p90: float
    answer_tokens_mean: float
    answer_tokens_median: float
    answer_tokens_p90: float
    never_answered_share: float
    limit_share: float
    unclosed_share: float | None
    looped_share: float | None
    loop_start_mean: float | None  # output tokens, of those that looped
    thoughts_mean: float
    repetition_mean: float
    first_answer_mean: float | None
    first_right_mean: float | None
    wrong_but_reached_share: (
        float | None
    )  # of wrong ones: the expected answer appeared in the chain
    wall_seconds: float
    cpu_seconds: float | None
    tokens_per_s: float  # output tokens by wall clock
    seconds_per_correct: float | None  # None: nothing was right
    cpu_seconds_per_correct: float | None
    kv_byte_steps: float | None
    kv_byte_seconds: float | None
    kv_side_byte_seconds: float | None
    kv_peak_bytes: int | None
    kv_byte_seconds_per_correct: float | None
    preemptions: int | None
    tokens_by_role: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run, as its JSON line holds it."""

    name: str
    chain_rule: str  # what counted as the chain, in words
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Summary  # flat in the JSON: `accuracy`, `thinking_tokens_mean`, ...
    tasks: Mapping[str, Summary]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Mean thinking tokens of the run over those of the base, on `pairs` pairs of samples."""

    pairs: int
    ratio: float | None  # None: no pairs, or the base's mean is 0
    ci: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskComparison:
    """One task of a run beside the same task of a base run, sample by sample."""

    task: str
    problems: int  # that have pairs
    pairs: int
    unpaired: int  # samples that only one of the two runs graded
    base_accuracy: float
    run_accuracy: float
    accuracy_difference: float  # run - base, on the pairs
    accuracy_difference_ci: Interval
    inflation: Ratio  # all pairs
    inflation_both_right: Ratio
    inflation_below_limit: Ratio  # neither hit the limit
    same_tokens: int | None  # pairs with the same output tokens; None if a run doesn't tell
    base_at_limit: int  # samples of the pairs
    run_at_limit: int
    base_tokens_per_s: float  # of the whole task
    run_tokens_per_s: float
    per_token_speedup: float | None  # tokens/s of the run over the base's
    end_to_end_speedup: float | None  # per-token speed-up / inflation
    base: Summary  # of the pairs, without costs
    run: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run beside a base run. Overall inflation is the mean of the tasks' ratios (a ratio of
    pooled means would weigh tasks by their length)."""

    base_name: str
    run_name: str
    mismatches: tuple[str, ...]  # what else differs and makes it unfair, in words
    tasks: tuple[TaskComparison, ...]
    inflation: float | None
    inflation_ci: Interval | None
    inflation_both_right: float | None
    inflation_below_limit: float | None
    accuracy_difference: float  # mean over tasks
    accuracy_difference_ci: Interval
    end_to_end_speedup: float | None  # geometric mean over tasks
