"""Contexts: every instruction set of this processor, with one thread and with two."""

from __future__ import annotations

import pytest

from engine.kernels.cpp import library
from engine.kernels.cpp.library import Context

PAIRS = [(set, threads) for set in library.available() for threads in (1, 2)]


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def context(request: pytest.FixtureRequest) -> Context:
    set, threads = request.param
    return library.opened(threads, set)


@pytest.fixture(params=library.available())
def both(request: pytest.FixtureRequest) -> tuple[Context, Context]:
    """One set with one thread and with two."""
    return library.opened(1, request.param), library.opened(2, request.param)


@pytest.fixture
def best() -> Context:
    """The best set with two threads; skips without the library."""
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    return library.opened(2, library.available()[-1])
