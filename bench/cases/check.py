"""Finds every op's cases, and holds one against its reference."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import bench.cases
from bench.cases.case import Case, error
from engine.kernels.cpp.library import Context


def all_cases() -> list[Case]:
    """Those of every module beside this one that has CASES."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench.cases.__path__))
    modules = [importlib.import_module(f"bench.cases.{name}") for name in names]
    return [case for module in modules for case in getattr(module, "CASES", ())]


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it fresh tensors hold NaN, so that an output left out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def gap(case: Case, context: Context) -> float:
    """The case's error on this context, as `error` has it."""
    trial = case.make(context)
    with poisoned():
        found = trial.run()
    return error(found, trial.expected())
