"""Methods in order at the same memory: of cells, of KV bytes, and of KV bytes and side state.

Equal budgets aren't equal memory: formats, biases, prompts that stay and remembered queries differ.
So a method's accuracy is read off its own budgets' runs, on straight lines over the logarithm of
what a sequence held on average over its steps; the full cache is every method's largest budget.
What a method's smallest budget exceeds isn't guessed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import log
from statistics import fmean

import numpy as np

from bench.evaluation.records import KVHeld
from bench.grid.folder import Result
from bench.grid.points import FULL

MEASURES: dict[str, Callable[[KVHeld], float]] = {
    "cells": lambda kv: kv.mean_cells,
    "KV bytes": lambda kv: kv.mean_bytes,
    "all bytes": lambda kv: kv.mean_bytes + kv.side_bytes,
}
REFERENCE = "snapkv"
"""Whose memory at each budget is what others are ranked at."""
SLACK = 0.02
"""By so much a method's smallest budget may exceed it and still count as the same."""

Curve = list[tuple[float, float]]
"""Memory and accuracy, ascending in memory."""


def rankings(found: Sequence[Result]) -> list[str]:
    """A Markdown table for each budget of the reference; none if it wasn't run."""
    curves = {name: _curves(found, of) for name, of in MEASURES.items()}
    levels = sorted(
        (each for each in found if each.method == REFERENCE), key=lambda each: each.cells or 0
    )
    return [_table(level, curves) for level in levels]


def _table(level: Result, curves: dict[str, dict[str, Curve]]) -> str:
    columns = []
    for name, of in MEASURES.items():
        memory = _memory(level, of)
        ranked = rank(curves[name], memory)
        shown = f"{memory:,.0f} cells" if name == "cells" else f"{memory / 1e3:,.0f} kB"
        columns.append([f"equal {name} ({shown})", "---", *ranked])
    rows = max(map(len, columns))
    padded = [column + [""] * (rows - len(column)) for column in columns]
    lines = [f"| {' | '.join(cells)} |" for cells in zip(*padded, strict=True)]
    title = f"### Ranked at what {level.method} holds at {level.budget}, on average"
    return f"{title}\n\n" + "\n".join(lines)


def rank(curves: dict[str, Curve], memory: float) -> list[str]:
    """The best first, with accuracies; those that don't fit aren't there."""
    known = ((read_off(curve, memory), method) for method, curve in curves.items())
    ordered = sorted((-accuracy, method) for accuracy, method in known if accuracy is not None)
    return [f"{method} {-100 * accuracy:.1f} %" for accuracy, method in ordered]


def read_off(curve: Curve, memory: float) -> float | None:
    """The accuracy at so much memory; None below the smallest."""
    sizes, accuracies = zip(*curve, strict=True)
    if memory * (1 + SLACK) < sizes[0]:
        return None
    return float(np.interp(log(memory), [log(size) for size in sizes], accuracies))


def _curves(found: Sequence[Result], of: Callable[[KVHeld], float]) -> dict[str, Curve]:
    """Of every method that has a budget."""
    curves: defaultdict[str, Curve] = defaultdict(list)
    for each in found:
        if each.cells is not None:
            curves[each.method].append((_memory(each, of), each.run.summary.accuracy))
    full = [(_memory(each, of), each.run.summary.accuracy) for each in found if each.method == FULL]
    return {method: _upwards(curve, full) for method, curve in curves.items()}


def _upwards(curve: Curve, full: Curve) -> Curve:
    """Ascending, with the full cache where that is more."""
    ordered = sorted(curve)
    return ordered + [point for point in full if point[0] > ordered[-1][0]]


def _memory(each: Result, of: Callable[[KVHeld], float]) -> float:
    return fmean(of(sample.kv) for sample in each.run.samples if sample.kv is not None)
