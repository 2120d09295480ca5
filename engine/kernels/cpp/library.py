"""Finds the native library and opens it: threads and instruction set, once for each pair."""

from __future__ import annotations

import ctypes
import logging
import os
import sysconfig
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

ABI = 2
"""TAUT_ABI of src/taut.h."""

SETS = ("portable", "avx2", "avx512", "vnni", "bf16", "amx")
"""Instruction sets, each with all that the ones before it have; their numbers in src/taut.h."""

FORCED = "TAUT_ISA"
"""Environment variable: the set to use, at most what the processor has."""

_FILE = "libtaut_kernels.so"


class Library:
    """The loaded library: `lib` has its functions, by the names of src/taut.h."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        found = self.lib.taut_abi()
        if found != ABI:
            raise OSError(f"{path} is of interface {found}, not {ABI}: build it again")
        self.best = SETS[self.lib.taut_best_set()]
        self.lib.taut_open.restype = ctypes.c_void_p
        self.lib.taut_close.argtypes = [ctypes.c_void_p]


class Context:
    """Threads and an instruction set to call the library with; `handle` is its first argument."""

    def __init__(self, library: Library, threads: int, set: str) -> None:
        self.lib = library.lib
        self.threads = threads
        self.set = set
        self.handle = ctypes.c_void_p(self.lib.taut_open(threads, SETS.index(set)))


@cache
def library() -> Library | str:
    """The library, or why there is none. It is looked for once; a failure is logged once."""
    places = [Path(__file__).parent, Path(sysconfig.get_path("platlib")) / "engine/kernels/cpp"]
    path = next((place / _FILE for place in places if (place / _FILE).is_file()), None)
    reason = f"{_FILE} isn't built: install with a C++ compiler present"
    if path is not None:
        try:
            return Library(path)
        except OSError as error:
            reason = str(error)
    log.warning("no native kernels, torch's are slower: %s", reason)
    return reason


def missing() -> str | None:
    """Why native kernels can't be had; None if they can."""
    found = library()
    return found if isinstance(found, str) else None


def context() -> Context:
    """With torch's number of threads and the best set, or the one that TAUT_ISA names.

    ValueError: it names none, or one that this processor lacks.
    """
    found = library()
    assert isinstance(found, Library), found
    return opened(torch.get_num_threads(), _set(found.best))


@cache
def opened(threads: int, set: str) -> Context:
    """One context for each pair, shared by all who ask: its threads sleep when nobody calls."""
    found = library()
    assert isinstance(found, Library), found
    return Context(found, threads, set)


def available() -> tuple[str, ...]:
    """The sets that this processor has, the best last; none without the library."""
    found = library()
    return () if isinstance(found, str) else SETS[: SETS.index(found.best) + 1]


def _set(best: str) -> str:
    name = os.environ.get(FORCED, best)
    if name not in SETS[: SETS.index(best) + 1]:
        raise ValueError(
            f"{FORCED} must be one of {', '.join(SETS[: SETS.index(best) + 1])} here, not {name!r}"
        )
    return name
