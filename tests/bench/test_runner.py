"""The runner with a scripted backend: every sample once, in the record as it was."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation.backend import Ask, Sampling
from bench.evaluation.records import Generation, Problem, Sample, Usage, Verdicted
from bench.evaluation.runner import Plan, digest_of, measure, seed_of
from bench.evaluation.store import Store
from bench.evaluation.summary import summarise
from engine.scheduler.detect import Loop

PROBLEMS = {
    task: [
        Problem(id=f"p{i}", task=task, question=f"{task} {i}?", answer=str(i), grader="number")
        for i in range(3)
    ]
    for task in ("sums", "more")
}


def plan(**changes: Any) -> Plan:
    made = Plan(tasks=PROBLEMS, samples=2, sampling=Sampling(max_tokens=100, seed=7))
    return replace(made, **changes)


def generation(text: str = r"so \boxed{1}", **changes: Any) -> Generation:
    made = Generation(
        text=text,
        thinking="",
        finish_reason="stop",
        prompt_tokens=5,
        output_tokens=8,
        thinking_tokens=6,
        answer_tokens=2,
        closed=None,
        seconds=0.5,
        token_ids=tuple(range(8)),
    )
    return replace(made, **changes)


class Scripted:
    """Answers in an order of its own; each answer takes a second and a step."""

    chain_rule = "all of it"

    def __init__(self, answers: Mapping[str, Generation] | None = None, stop: int = -1) -> None:
        self.asked: list[Ask] = []
        self._answers = answers or {}
        self._stop = stop  # before so manyth answer: interrupted

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[Ask, Generation]]:
        for ask in reversed(list(asks)):
            if len(self.asked) == self._stop:
                raise KeyboardInterrupt
            self.asked.append(ask)
            yield ask, self._answers.get(ask.key[1], generation())

    def usage(self) -> Usage:
        ran = len(self.asked)
        return Usage(
            wall_seconds=float(ran),
            cpu_seconds=2.0 * ran,
            steps=ran,
            kv_byte_steps=100.0 * ran,
            kv_byte_seconds=10.0 * ran,
            kv_side_byte_seconds=1.0 * ran,
            kv_peak_bytes=50,
            preemptions=0,
            ran_tokens={"main": 13 * ran, **({"helper": ran} if ran > 3 else {})},
        )

    def environment(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        pass


class Grades:
    """Right where the text has the expected answer; verdicts of `late` come only at the end."""

    def __init__(self, verdicts: Mapping[str, Verdicted] | None = None) -> None:
        self.graded: list[str] = []
        self._verdicts = verdicts or {}

    def submit(self, text: str, problem: Problem) -> Future[Verdicted]:
        self.graded.append(problem.id)
        right = Verdicted("right" if problem.answer in text else "wrong", "1")
        future: Future[Verdicted] = Future()
        future.set_result(self._verdicts.get(problem.id, right))
        return future


class View:
    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.shown: list[Sample] = []

    def begin(self, task: str, total: int, done: int) -> None:
        self.begun.append((task, total, done))

    def show(self, sample: Sample) -> None:
        self.shown.append(sample)


def measured(
    folder: Path, backend: Scripted, grades: Any = None, asked: Plan | None = None
) -> tuple[Sequence[Sample], list[tuple[str, Usage]], View]:
    view = View()
    with Store(folder / "run.json", {}) as store:
        measure(asked or plan(), backend, grades or Grades(), store, view)
    return store.samples, store.usages, view


def test_every_sample_once_task_by_task(tmp_path: Path) -> None:
    backend = Scripted()
    samples, usages, view = measured(tmp_path, backend)
    expected = {(t, f"p{i}", n) for t in PROBLEMS for i in range(3) for n in range(2)}
    assert {sample.key for sample in samples} == expected
    assert len(samples) == 12
    assert [sample.task for sample in samples] == ["sums"] * 6 + ["more"] * 6
    assert view.begun == [("sums", 6, 0), ("more", 6, 0)]
    assert view.shown == samples
    assert {s.problem for s in samples if s.right} == {"p1"}
    assert [name for name, _ in usages] == [sample.task for sample in samples]


def test_costs_are_split_between_tasks_and_add_up(tmp_path: Path) -> None:
    samples, usages, _ = measured(tmp_path, Scripted())
    for task, ran in (("sums", 6), ("more", 6)):
        figures = summarise(
            [s for s in samples if s.task == task], [u for name, u in usages if name == task]
        )
        assert figures.wall_seconds == ran
        assert figures.cpu_seconds == 2 * ran
        assert figures.kv_byte_steps == 100 * ran
        assert figures.kv_peak_bytes == 50
        assert figures.seconds_per_correct == ran / 2
    whole = summarise(samples, [usage for _, usage in usages])
    assert whole.tokens_by_role == {"main": 13 * 12, "helper": 12}


def test_a_sample_has_its_own_seed_whatever_runs_beside_it(tmp_path: Path) -> None:
    samples, _, _ = measured(tmp_path, Scripted())
    assert len({sample.seed for sample in samples}) == 12
    fewer = plan(tasks={"more": PROBLEMS["more"][1:]}, samples=1)
    backend = Scripted()
    (tmp_path / "b").mkdir()
    again, _, _ = measured(tmp_path / "b", backend, asked=fewer)
    seeds = {sample.key: sample.seed for sample in samples}
    assert all(sample.seed == seeds[sample.key] for sample in again)
    assert all(ask.params.seed == seeds[ask.key] for ask in backend.asked)
    assert seed_of(7, "more", "p1", 0) == seeds["more", "p1", 0] != seed_of(8, "more", "p1", 0)


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        measured(tmp_path, Scripted(stop=8))
    backend = Scripted()
    samples, usages, view = measured(tmp_path, backend)
    assert len({sample.key for sample in samples}) == len(samples) == 12
    assert len(backend.asked) == 4
    assert view.begun == [("sums", 6, 6), ("more", 6, 2)]
    assert sum(usage.wall_seconds for _, usage in usages) == 12


def test_a_problem_that_crashes_is_recorded_and_the_run_goes_on(tmp_path: Path) -> None:
    crash = generation("", finish_reason="error", error="out of pages", token_ids=())
    grades = Grades()
    samples, _, _ = measured(tmp_path, Scripted({"p0": crash}), grades)
    crashed = [sample for sample in samples if sample.verdict == "error"]
    assert [(sample.problem, sample.error) for sample in crashed] == [("p0", "out of pages")] * 4
    assert "p0" not in grades.graded
    assert summarise(samples, []).errors == 4


def test_a_grader_that_failed_is_recorded_as_such(tmp_path: Path) -> None:
    grades = Grades({"p2": Verdicted("grader_error", "1", "too slow")})
    samples, _, _ = measured(tmp_path, Scripted(), grades)
    failed = [sample for sample in samples if sample.verdict == "grader_error"]
    assert {(sample.problem, sample.error) for sample in failed} == {("p2", "too slow")}
    assert summarise(samples, []).accuracy == 0.5  # of p0 and p1


class SlowGrades(Grades):
    """The first verdict comes when the fourth is asked for, out of order then."""

    def __init__(self) -> None:
        super().__init__()
        self._first: Future[Verdicted] | None = None

    def submit(self, text: str, problem: Problem) -> Future[Verdicted]:
        future = super().submit(text, problem)
        if self._first is None:
            self._first, self._verdict = Future(), future.result()
            return self._first
        if len(self.graded) == 4:
            self._first.set_result(self._verdict)
        return future


def test_slow_grades_keep_the_order(tmp_path: Path) -> None:
    backend = Scripted()
    samples, usages, _ = measured(tmp_path, backend, SlowGrades())
    assert [sample.key for sample in samples] == [ask.key for ask in backend.asked]
    assert [usage.wall_seconds for _, usage in usages][:5] == [4, 0, 0, 0, 1]


def test_loops_chains_and_digests(tmp_path: Path) -> None:
    ids = (1, 2, 3) * 30
    looped = generation("around", finish_reason="length", token_ids=(9, *ids))
    stopped = generation("around", token_ids=(9, *ids, 0))  # with an end-of-sequence token
    samples, _, _ = measured(tmp_path, Scripted({"p0": looped, "p2": stopped}))
    by_problem = {sample.problem: sample for sample in samples}
    assert by_problem["p0"].loop == by_problem["p2"].loop == Loop(start=1, period=3)
    assert by_problem["p1"].loop is None
    assert by_problem["p0"].digest == digest_of(list(looped.token_ids or ()))
    assert len({sample.digest for sample in by_problem.values()}) == 3


@pytest.mark.parametrize(
    ("made", "thoughts"),
    [
        (generation("a\n\nb\n\nc \\boxed{1}\n\nd"), 3),  # before the last box
        (generation("a\n\nb\n\nc"), 3),  # never answered: all of it
        (generation("a \\boxed{1}", thinking="x\n\ny", closed=True), 2),  # between markers
    ],
)
def test_what_is_taken_apart_is_the_chain(tmp_path: Path, made: Generation, thoughts: int) -> None:
    samples, _, _ = measured(tmp_path, Scripted({f"p{i}": made for i in range(3)}))
    assert {sample.anatomy.thoughts for sample in samples if sample.anatomy} == {thoughts}


def test_a_backend_that_tells_nothing(tmp_path: Path) -> None:
    class Silent(Scripted):
        def usage(self) -> Usage:
            return Usage(wall_seconds=float(len(self.asked)))

    silent = generation(token_ids=None)
    samples, usages, _ = measured(tmp_path, Silent({f"p{i}": silent for i in range(3)}))
    figures = summarise(samples, [usage for _, usage in usages])
    assert figures.cpu_seconds is None
    assert figures.kv_byte_steps is None
    assert figures.looped_share is None
    assert figures.wall_seconds == 12


def test_a_problem_may_bring_its_instruction() -> None:
    (usual, *_) = PROBLEMS["sums"]
    own = replace(usual, instruction="")

    def asked(made: Plan, problem: Problem) -> str:
        return made.ask(problem, 0).messages[-1]["content"]

    assert "boxed" in asked(plan(), usual)
    assert asked(plan(), own) == own.question
    assert asked(plan(instruction="Be brief."), own) == f"{own.question}\n\nBe brief."
