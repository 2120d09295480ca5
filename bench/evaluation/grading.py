"""Grading in a process of its own: sympy can be slow, endless or hungry, and scorers can crash."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, TimeoutError
from types import TracebackType
from typing import TYPE_CHECKING

from bench.evaluation import graders
from bench.evaluation.records import Problem, Verdicted

if TYPE_CHECKING:
    from pebble import ProcessPool

MEMORY_BYTES = 8 << 30
"""Address space of the worker where the system can limit it: `9^{9^{9}}` mustn't take it all."""


class Grading:
    """Grades answers, one at a time, in a worker process.

    An answer that isn't graded within `timeout_s`, that makes its grader raise, or that kills the
    worker is a `grader_error` with its reason, never wrong; the next one gets a fresh worker.
    Leaving the context waits for what was submitted, or drops it if an exception is on its way.
    `grade` must be importable by name: the worker is spawned, so it inherits neither threads nor
    models, and imports the main module again.
    """

    def __init__(
        self,
        timeout_s: float = 30.0,
        *,
        grade: Callable[[str, Problem], Verdicted] = graders.grade,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        self.timeout_s = timeout_s
        self._grade = grade
        self._pool = _pool()
        self._runs: set[Future[Verdicted]] = set()

    def submit(self, text: str, problem: Problem) -> Future[Verdicted]:
        """The verdict on an answer, whose future never fails. Raises ValueError for a grader that
        there isn't."""
        if problem.grader not in graders.GRADERS:
            known = ", ".join(graders.GRADERS)
            raise ValueError(f"there is no grader {problem.grader!r}; known: {known}")
        graded: Future[Verdicted] = Future()
        graded.set_running_or_notify_cancel()  # the caller can't cancel it

        def settle(run: Future[Verdicted]) -> None:
            self._runs.discard(run)
            graded.set_result(self._outcome(run, text))

        run = self._pool.schedule(self._grade, args=(text, problem), timeout=self.timeout_s)
        self._runs.add(run)
        run.add_done_callback(settle)
        return graded

    def _outcome(self, run: Future[Verdicted], text: str) -> Verdicted:
        from pebble import ProcessExpired

        try:
            return run.result()
        except TimeoutError:
            error = f"the grader took more than {self.timeout_s:g} s"
        except ProcessExpired as expired:
            error = f"the grader's process died with exit code {expired.exitcode}"
        except CancelledError:
            error = "grading was stopped"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        return Verdicted("grader_error", graders.extract_boxed(text), error)

    def __enter__(self) -> Grading:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._pool.close()
        else:
            for run in list(self._runs):  # stopping the pool alone leaves them undone
                run.cancel()
            self._pool.stop()
        self._pool.join()


def _pool() -> ProcessPool:
    try:
        from pebble import ProcessPool
    except ImportError:
        raise ValueError("grading needs pebble: pip install 'taut[quality]'") from None
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=1, initializer=_limit_memory, context=context)


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on Windows, or lower already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
