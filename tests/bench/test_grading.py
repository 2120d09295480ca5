"""The worker: what hangs, dies or raises is a grader's error, and the next answer is graded."""

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from bench.evaluation.grading import Grading
from bench.evaluation.records import Problem, Verdicted
from tests.bench.graders_that_fail import obey

PROBLEM = Problem(id="p", task="gsm8k", question="?", answer="18", grader="number")


@pytest.fixture(scope="module")
def obeying() -> Iterator[Grading]:
    with Grading(1.0, grade=obey) as grading:
        yield grading


def boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


@pytest.mark.parametrize(
    ("order", "error"),
    [
        ("sleep", "the grader took more than 1 s"),
        ("die", "the grader's process died with exit code 3"),
        ("raise", "KeyError: 'no such thing'"),
    ],
)
def test_a_failure_is_no_verdict_and_the_next_answer_is_graded(
    obeying: Grading, order: str, error: str
) -> None:
    before = obeying.submit(boxed("fine"), PROBLEM)
    failed = obeying.submit(boxed(order), PROBLEM)
    after = obeying.submit(boxed("fine"), PROBLEM)
    assert failed.result(20) == ("grader_error", order, error)
    pids = before.result(20).answer, after.result(20).answer
    assert str(os.getpid()) not in pids
    assert (pids[0] == pids[1]) == (order == "raise")


def test_leaving_waits_for_what_was_submitted() -> None:
    with Grading() as grading:
        futures = [grading.submit(boxed(answer), PROBLEM) for answer in ("18", "19")]
        futures.append(grading.submit("It is 18.", PROBLEM))
    assert [future.result(0).verdict for future in futures] == ["right", "wrong", "unanswered"]


def test_leaving_by_an_exception_drops_what_waits() -> None:
    futures: list[Future[Verdicted]] = []

    def interrupted() -> None:
        with Grading(30.0, grade=obey) as grading:
            futures.extend(grading.submit(boxed("sleep"), PROBLEM) for _ in range(2))
            raise InterruptedError

    with pytest.raises(InterruptedError):
        interrupted()
    stopped = ("grader_error", "sleep", "grading was stopped")
    assert [future.result(0) for future in futures] == [stopped, stopped]


def test_bad_calls() -> None:
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        Grading(0)
    other = Problem(id="p", task="t", question="?", answer="18", grader="guess")
    with (
        Grading(grade=obey) as grading,
        pytest.raises(ValueError, match=r"no grader 'guess'; known: number"),
    ):
        grading.submit("", other)
