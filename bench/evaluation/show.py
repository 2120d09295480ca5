"""A finished run, and runs to compare it with: tables on the terminal, a report in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.evaluation.compare import compare, mismatches
from bench.evaluation.records import Run
from bench.evaluation.table import comparison_table, summary_table


def show(run: Run, bases: Sequence[Run], report: Path | None) -> None:
    comparisons = [compare(base, run) for base in bases]
    unfair = {base.name: mismatches(base, run) for base in bases}
    console = Console()
    console.print(summary_table(run))
    if comparisons:
        console.print(comparison_table(comparisons, unfair))
    if report is not None:
        from bench.evaluation.report import write_report  # matplotlib takes a second to import

        write_report(report, [run, *bases], comparisons, unfair)
