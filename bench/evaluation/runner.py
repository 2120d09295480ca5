"""One run: every problem's samples made, graded and recorded, task by task."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from bench.evaluation import prompts
from bench.evaluation.anatomy import take_apart
from bench.evaluation.backend import Ask, Backend, Sampling
from bench.evaluation.records import Generation, Problem, Sample, Usage, Verdicted
from bench.evaluation.store import Store
from engine.scheduler.detect import Loop, find_loop

Tasks = Mapping[str, Sequence[Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked, how often, and how it is sampled (`sampling.seed` is the run's)."""

    tasks: Tasks
    samples: int
    sampling: Sampling
    instruction: str | None = None
    system: str | None = None

    def ask(self, problem: Problem, index: int) -> Ask:
        key = (problem.task, problem.id, index)
        seed = seed_of(self.sampling.seed or 0, *key)
        told = problem.instruction if self.instruction is None else self.instruction
        return Ask(
            key=key,
            messages=prompts.messages(problem.question, instruction=told, system=self.system),
            params=replace(self.sampling, seed=seed),
        )


class Grades(Protocol):
    """Grades an answer, elsewhere and within a time limit."""

    def submit(self, text: str, problem: Problem) -> Future[Verdicted]: ...


class View(Protocol):
    """Shows a run as it goes."""

    def begin(self, task: str, total: int, done: int) -> None: ...
    def show(self, sample: Sample) -> None: ...


def seed_of(run_seed: int, task: str, problem: str, index: int) -> int:
    """A sample's own seed: the same in every run of that seed, whatever else is asked."""
    text = "\0".join((str(run_seed), task, problem, str(index)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def measure(plan: Plan, backend: Backend, grading: Grades, store: Store, view: View) -> None:
    """Make what the store doesn't have yet; the tasks one after the other."""
    for task, problems in plan.tasks.items():
        done = [sample for sample in store.samples if sample.task == task]
        view.begin(task, len(problems) * plan.samples, len(done))
        _Task(plan, problems, {sample.key for sample in done}).run(backend, grading, store, view)


class _Task:
    """One task of a run."""

    def __init__(
        self, plan: Plan, problems: Sequence[Problem], done: set[tuple[str, str, int]]
    ) -> None:
        self._plan = plan
        self._problems = {problem.id: problem for problem in problems}
        self._done = done
        self._grading: deque[tuple[Ask, Generation, Future[Verdicted] | None]] = deque()

    def _asks(self) -> Iterator[Ask]:
        for problem in self._problems.values():
            for index in range(self._plan.samples):
                if (problem.task, problem.id, index) not in self._done:
                    yield self._plan.ask(problem, index)

    def run(self, backend: Backend, grading: Grades, store: Store, view: View) -> None:
        before = backend.usage()

        def record(*, wait: bool) -> None:
            nonlocal before
            for sample in self._finished(wait=wait):
                now = backend.usage()
                store.add(sample, difference(now, before))
                before = now
                view.show(sample)

        try:
            for ask, made in backend.run(self._asks()):
                graded = None if made.error else grading.submit(made.text, self._problem(ask))
                self._grading.append((ask, made, graded))
                record(wait=False)
        finally:
            record(wait=True)  # what was made isn't lost if the run is interrupted

    def _problem(self, ask: Ask) -> Problem:
        return self._problems[ask.key[1]]

    def _finished(self, *, wait: bool) -> Iterator[Sample]:
        """Samples whose grades are there, in the order in which they were made."""
        while self._grading:
            ask, made, graded = self._grading[0]
            if graded is not None and not wait and not graded.done():
                return
            self._grading.popleft()
            verdict = Verdicted("error", None, made.error) if graded is None else graded.result()
            yield _sample(ask, self._problem(ask), made, verdict)


def _sample(ask: Ask, problem: Problem, made: Generation, graded: Verdicted) -> Sample:
    task, name, index = ask.key
    crashed = graded.verdict == "error"
    assert ask.params.seed is not None
    return Sample(
        task=task,
        problem=name,
        index=index,
        seed=ask.params.seed,
        question=digest_of(problem.question),
        expected=problem.answer,
        verdict=graded.verdict,
        answer=graded.answer,
        error=graded.error,
        finish_reason=made.finish_reason,
        prompt_tokens=made.prompt_tokens,
        output_tokens=made.output_tokens,
        thinking_tokens=made.thinking_tokens,
        answer_tokens=made.answer_tokens,
        closed=made.closed,
        seconds=made.seconds,
        loop=_loop(made),
        anatomy=None if crashed else take_apart(made.chain, graded.answer, problem.answer),
        digest=None if made.token_ids is None else digest_of(made.token_ids),
        text=made.text,
        thinking=made.thinking,
        kv=made.kv,
    )


def _loop(made: Generation) -> Loop | None:
    """Where the output ends in one; an end-of-sequence token isn't of its text."""
    if made.token_ids is None:
        return None
    return find_loop(made.token_ids[:-1] if made.finish_reason == "stop" else made.token_ids)


def digest_of(items: Sequence[Any]) -> str:
    """Of tokens, problems or text: tells at a glance whether two runs had the same."""
    return hashlib.blake2b(repr(list(items)).encode(), digest_size=8).hexdigest()


_LEVELS = ("kv_peak_bytes",)  # not sums


def difference(now: Usage, before: Usage) -> Usage:
    """What was taken from `before` to `now`."""
    return Usage(**{f.name: _less(f.name, now, before) for f in fields(Usage)})


def _less(name: str, now: Usage, before: Usage) -> Any:
    value, base = getattr(now, name), getattr(before, name)
    if value is None or name in _LEVELS:
        return value
    if name == "ran_tokens":
        return {role: tokens - base.get(role, 0) for role, tokens in value.items()}
    return value - base
