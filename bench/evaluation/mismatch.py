"""What makes it unfair to set one run beside another, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.evaluation.records import Run, Sample

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


def mismatches(base: Run, run: Run) -> list[str]:
    """A line for each setting, rule and set of problems that differs; none if the pairing is fair.

    Samples that crashed or weren't graded in one run are no mismatch unless a task has no pair
    left: they are counted as unpaired.
    """
    return [*_settings(base, run), *_tasks(base, run)]


def graded_keys(run: Run, task: str) -> set[tuple[str, str, int]]:
    """Of the task's samples that pair with another run's, if it graded them too."""
    return {sample.key for sample in run.samples if sample.graded and sample.task == task}


def _settings(base: Run, run: Run) -> list[str]:
    told = [(name, base.settings.get(name), run.settings.get(name)) for name in FAIR_SETTINGS]
    told.append(("what counts as the chain", base.chain_rule, run.chain_rule))
    return [
        f"{name}: {_words(ours)} in {base.name}, {_words(theirs)} in {run.name}"
        for name, ours, theirs in told
        if ours != theirs
    ]


def _words(value: object) -> str:
    return "not told" if value is None else str(value)


def _tasks(base: Run, run: Run) -> Iterable[str]:
    ours, theirs = _answers(base.samples), _answers(run.samples)
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
    task: str, base: Run, run: Run, ours: Mapping[str, str], theirs: Mapping[str, str]
) -> Iterable[str]:
    for name, mine, other in ((base.name, ours, theirs), (run.name, theirs, ours)):
        only = [problem for problem in mine if problem not in other]
        if only:
            yield f"{task}: {_some(only)} only in {name}"
    changed = [problem for problem in ours if theirs.get(problem, ours[problem]) != ours[problem]]
    if changed:
        yield f"{task}: {_some(changed)} with another expected answer"
    if not graded_keys(base, task) & graded_keys(run, task):
        yield f"{task}: no sample that both graded"


def _some(problems: list[str]) -> str:
    more = ", ..." if len(problems) > 3 else ""
    noun = "problem" if len(problems) == 1 else "problems"
    return f"{len(problems)} {noun} ({', '.join(problems[:3])}{more})"


def _answers(samples: Iterable[Sample]) -> dict[str, dict[str, str]]:
    """Expected answers by task and problem."""
    answers: dict[str, dict[str, str]] = {}
    for sample in samples:
        answers.setdefault(sample.task, {})[sample.problem] = sample.expected
    return answers
