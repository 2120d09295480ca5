"""The report: one HTML file that reads from disk, with nothing outside it.

The same input gives the same bytes. Text of models and names are escaped by the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from bench.evaluation import figures, units
from bench.evaluation.records import Comparison, Run, Sample, Summary

if TYPE_CHECKING:
    from bench.evaluation.plots import Plot

SAMPLES = 200  # in the whole file
WORST = 10  # of each run
TEXT_CHARS = 4000  # of a chain or an answer

Rows = list[tuple[str, list[str]]]


def write_report(path: Path | str, runs: Sequence[Run], comparisons: Sequence[Comparison]) -> None:
    """Write the report of `runs`, of which `comparisons` set some beside their base.

    The limit in the plots of chain lengths is a run's `settings["max_tokens"]`.

    ValueError: no runs.
    """
    if not runs:
        raise ValueError("runs is empty: a report needs at least one run")
    plots = _plots(runs)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shorten"] = shorten
    html = environment.get_template("report.html.j2").render(
        runs=runs,
        names=[run.name for run in runs],
        settings=_side_by_side([run.settings for run in runs]),
        environments=_side_by_side([run.environment for run in runs]),
        summaries=_summaries(runs),
        groups=figures.GROUPS,
        anatomy=figures.ANATOMY,
        comparisons=comparisons,
        few_problems=figures.few_problems,
        compared_groups=figures.COMPARED_GROUPS,
        plots=[(plot, Markup(plot.svg or "")) for plot in plots],
        failures=[(run.name, figures.failures(run)) for run in runs],
        worst=[(run.name, worst(run.samples)) for run in runs],
        shown=max(1, SAMPLES // len(runs)),
        count=units.count,
        amount=units.amount,
    )
    # a model may leave half a surrogate pair, which has no UTF-8
    Path(path).write_text(html, encoding="utf-8", errors="replace")


def shorten(text: str) -> str:
    """Without its middle where it is long."""
    left_out = len(text) - TEXT_CHARS
    if left_out <= 0:
        return text
    half = TEXT_CHARS // 2
    return f"{text[:half]}\n\n[{left_out:,} characters left out]\n\n{text[-half:]}"


def worst(samples: Iterable[Sample]) -> list[Sample]:
    """Most tokens in a loop first, then the longest that hit the limit."""

    def wasted(sample: Sample) -> tuple[int, int]:
        looped = sample.output_tokens - sample.loop.start if sample.loop else 0
        return -looped, -sample.output_tokens

    return sorted((s for s in samples if s.loop or s.at_limit), key=wasted)[:WORST]


def _plots(runs: Sequence[Run]) -> list[Plot]:
    # matplotlib takes a second to import: only who writes a report pays
    from bench.evaluation.plots import AXES, accuracy_plot, chain_plot

    plots = [accuracy_plot(runs, axis, f"plot{i}") for i, axis in enumerate(AXES)]
    chains = [chain_plot(runs, task, f"plot{i}") for i, task in enumerate(_tasks(runs), len(plots))]
    return plots + chains


def _tasks(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.tasks))


def _summaries(runs: Sequence[Run]) -> dict[str, list[Summary | None]]:
    """Of each task, one for each run; None where a run doesn't have the task."""
    tasks = _tasks(runs)
    found: dict[str, list[Summary | None]] = {
        task: [run.tasks.get(task) for run in runs] for task in tasks
    }
    if len(tasks) > 1:
        found["all pooled"] = [run.summary for run in runs]
    return found


def _side_by_side(mappings: Sequence[Mapping[str, Any]]) -> Rows:
    """A row for each name, with its value in each mapping."""
    flat = [dict(_flat(mapping)) for mapping in mappings]
    names = dict.fromkeys(name for values in flat for name in values)
    return [(name, [values.get(name, "not set") for values in flat]) for name in names]


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for name, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield f"{prefix}{name}", text
