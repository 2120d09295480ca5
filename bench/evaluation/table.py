"""The final table on stdout: a few narrow tables, a row for each task."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.evaluation import figures
from bench.evaluation.records import Comparison, Run

_NAME_WIDTH = 14


def summary_table(run: Run) -> Group:
    """Accuracy, lengths, endings and cost of each task, and of all pooled if there are several."""
    summaries = dict(run.tasks)
    if len(summaries) > 1:
        summaries["all pooled"] = run.summary
    parts: list[RenderableType] = [Text(run.name, style="bold")]
    for group in figures.GROUPS.values():
        rows = ([name, *(f.show(summary) for f in group)] for name, summary in summaries.items())
        parts.append(_table([figure.name for figure in group], rows))
    parts.append(Text(f"Chain: {run.chain_rule}"))
    parts += [
        Text(f"! {count} x {message}", style="yellow") for message, count in figures.failures(run)
    ]
    return Group(*parts)


def comparison_table(comparisons: Sequence[Comparison]) -> Group:
    """Each run beside its base."""
    parts: list[RenderableType] = []
    for comparison in comparisons:
        title = f"{comparison.run_name} beside {comparison.base_name} (base)"
        parts.append(Text(title, style="bold"))
        parts += [Text(f"! {note}", style="yellow") for note in comparison.mismatches]
        if few := figures.few_problems(comparison):
            parts.append(Text(f"! {few}", style="yellow"))
        parts += [_compared(comparison, group) for group in figures.COMPARED_GROUPS.values()]
    return Group(*parts)


def _compared(comparison: Comparison, group: Sequence[figures.Compared]) -> Table:
    rows = [[task.task, *(f.show(task) for f in group)] for task in comparison.tasks]
    overall = [f.overall(comparison) for f in group]
    if len(rows) > 1 and any(overall):
        rows.append(["mean of tasks", *overall])
    return _table([figure.name for figure in group], rows)


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("task", overflow="fold", min_width=8)
    for name in names:
        table.add_column(textwrap.fill(name, _NAME_WIDTH), no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
