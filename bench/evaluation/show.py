"""Finished runs: read from their files, shown as tables on the terminal and in a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.evaluation.compare import compare
from bench.evaluation.records import Run
from bench.evaluation.records_json import from_json
from bench.evaluation.table import comparison_table, summary_table


def read_run(path: Path) -> Run:
    """ValueError: the file holds no run."""
    return from_json(path.read_bytes(), str(path))


def show(run: Run, bases: Sequence[Run], report: Path | None) -> None:
    """ValueError: a base that shares no sample with the run."""
    console = Console()
    console.print(summary_table(run))
    comparisons = [compare(base, run) for base in bases]
    if comparisons:
        console.print(comparison_table(comparisons))
    if report is not None:
        from bench.evaluation.report import write_report  # matplotlib takes a second to import

        write_report(report, [run, *bases], comparisons)
