"""The threads of a context: many small calls, two contexts at once, long sleeps."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from engine.kernels.cpp import library
from engine.kernels.cpp.library import Context
from engine.kernels.cpp.rows import NativeRows

ROWS, WIDTH = 40, 16_400
"""Two tasks a row, so that threads have something to take from each other."""


TASKS = "/proc/self/task"


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def test_many_calls_in_turn_on_two_contexts(best: Context, logits: torch.Tensor) -> None:
    contexts = best, library.opened(3, best.set)
    sides = [NativeRows(context) for context in contexts]
    small = logits[:4, :300].contiguous()
    expected = sides[0].row_stats(small)
    for _ in range(300):
        for side in sides:
            found = side.row_stats(small)
            assert torch.equal(found.entropy, expected.entropy)


def test_two_contexts_at_once(best: Context, logits: torch.Tensor) -> None:
    expected = NativeRows(best).row_stats(logits)
    wrong: list[int] = []

    def work(threads: int) -> None:
        rows = NativeRows(library.opened(threads, best.set))
        for _ in range(10):
            found = rows.row_stats(logits)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(threads)

    callers = [threading.Thread(target=work, args=(threads,)) for threads in (2, 3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_context_wakes_from_sleep(best: Context, logits: torch.Tensor) -> None:
    rows = NativeRows(best)
    expected = rows.row_stats(logits)
    for pause in (0.0, 1e-5, 1e-3, 0.2):
        time.sleep(pause)
        assert torch.equal(rows.row_stats(logits).logsumexp, expected.logsumexp)


@pytest.mark.skipif(not os.path.isdir(TASKS), reason="threads are counted by /proc")
def test_contexts_close_whether_busy_or_asleep(best: Context, logits: torch.Tensor) -> None:
    opened = library.library()
    assert isinstance(opened, library.Library)
    before = len(os.listdir(TASKS))
    for pause in (0.0, 0.01):
        context = Context(opened, 4, best.set)
        NativeRows(context).row_stats(logits)
        time.sleep(pause)
        context.lib.taut_close(context.handle)
    assert len(os.listdir(TASKS)) == before
