"""What makes it unfair to set one run beside another, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.evaluation.records import Run, Sample

Asked = tuple[str, str]  # a question's digest, and the expected answer

FAIR_SETTINGS = (
    "max_tokens",
    "seed",
    "samples",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
)
"""Settings that both runs must share; models, weights and KV policies are what is compared."""

FAIR_ENVIRONMENT = ("max_model_len",)

COST_SETTINGS = ("max_num_seqs", "max_batched_tokens", "concurrency")
COST_ENVIRONMENT = ("cpu", "cpus", "threads", "gpu", "backend", "resumed_samples")
"""Where these differ, speeds don't compare; answers do."""


def mismatches(base: Run, run: Run) -> list[str]:
    """A line for each setting, rule, place and set of problems that differs; none if all is fair.

    Samples that crashed or weren't graded in one run are no mismatch unless a task has no pair
    left: they are counted as unpaired.
    """
    return [*_settings(base, run), *_tasks(base, run)]


def _settings(base: Run, run: Run) -> list[str]:
    rows = (
        ("", FAIR_SETTINGS, base.settings, run.settings),
        ("", FAIR_ENVIRONMENT, base.environment, run.environment),
        ("speed: ", COST_SETTINGS, base.settings, run.settings),
        ("speed: ", COST_ENVIRONMENT, base.environment, run.environment),
    )
    told: list[tuple[str, object, object]] = []
    told.append(("what counts as the chain", base.chain_rule, run.chain_rule))
    told += [
        (prefix + name, ours.get(name), theirs.get(name))
        for prefix, names, ours, theirs in rows
        for name in names
    ]
    return [
        f"{name}: {_words(ours)} in {base.name}, {_words(theirs)} in {run.name}"
        for name, ours, theirs in told
        if ours != theirs
    ]


def _words(value: object) -> str:
    return "not told" if value is None else str(value)


def _tasks(base: Run, run: Run) -> Iterable[str]:
    ours, theirs = _asked(base.samples), _asked(run.samples)
    for name, only in (
        (base.name, [task for task in ours if task not in theirs]),
        (run.name, [task for task in theirs if task not in ours]),
    ):
        if only:
            yield f"tasks only in {name}: {', '.join(only)}"
    for task in ours:
        if task in theirs:
            yield from _problems(task, base, run, ours[task], theirs[task])


def _problems(
    task: str, base: Run, run: Run, ours: Mapping[str, Asked], theirs: Mapping[str, Asked]
) -> Iterable[str]:
    for name, mine, other in ((base.name, ours, theirs), (run.name, theirs, ours)):
        only = [problem for problem in mine if problem not in other]
        if only:
            yield f"{task}: {_some(only)} only in {name}"
    changed = [problem for problem in ours if theirs.get(problem, ours[problem]) != ours[problem]]
    if changed:
        yield f"{task}: {_some(changed)} with another question or expected answer, not paired"
    if len(changed) < len(ours.keys() & theirs.keys()) and not _graded(base, task) & _graded(
        run, task
    ):
        yield f"{task}: no sample that both graded"


def _graded(run: Run, task: str) -> set[tuple[str, str, int]]:
    return {sample.key for sample in run.samples if sample.graded and sample.task == task}


def _some(problems: list[str]) -> str:
    more = ", ..." if len(problems) > 3 else ""
    noun = "problem" if len(problems) == 1 else "problems"
    return f"{len(problems)} {noun} ({', '.join(problems[:3])}{more})"


def _asked(samples: Iterable[Sample]) -> dict[str, dict[str, Asked]]:
    """By task and problem."""
    asked: dict[str, dict[str, Asked]] = {}
    for sample in samples:
        asked.setdefault(sample.task, {})[sample.problem] = sample.question, sample.expected
    return asked
