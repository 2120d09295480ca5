"""What of the engine's time isn't spent in the native layers and matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from engine.kernels.cpp.layers import NativeLayers
from engine.kernels.cpp.linear import NativeLinear


class Outside(NamedTuple):
    """Processor time of the calling thread outside native calls, and its share of all."""

    seconds: float
    share: float


def outside_of(work: Callable[[], Any]) -> Outside:
    """The clock is this thread's processor time, which other processes disturb least; while the
    native threads work it works with them. The share is for as many threads as there are."""
    inside: list[float] = []
    with _timed(NativeLayers, inside), _timed(NativeLinear, inside):
        start = time.thread_time()
        work()
        whole = time.thread_time() - start
    outside = whole - sum(inside)
    return Outside(outside, outside / whole)


@contextmanager
def _timed(kind: type[Any], spans: list[float]) -> Iterator[None]:
    """Within it every call of an object of this class leaves its seconds."""
    call = kind.__call__

    def timed(self: Any, *args: Any) -> Any:
        start = time.thread_time()
        try:
            return call(self, *args)
        finally:
            spans.append(time.thread_time() - start)

    kind.__call__ = timed
    try:
        yield
    finally:
        kind.__call__ = call
