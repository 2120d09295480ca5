"""The report's plots as inline SVG: text stays text, in the page's own colour."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.evaluation import figures
from bench.evaluation.records import Run, Sample, Summary

_INK = "#010203"  # becomes currentColor, so that a plot reads on light and dark
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_MARKERS = "osD^vPX*"
_BINS = 30
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are no formulas
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{f"{part}.color": _INK for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": _INK for part in ("edgecolor", "labelcolor", "titlecolor")},
    "legend.frameon": False,
}


class Plot(NamedTuple):
    """`svg` None: nothing could be drawn, and the caption says why."""

    title: str
    svg: str | None
    caption: str


class Axis(NamedTuple):
    """What a summary's accuracy is drawn against."""

    title: str
    label: str
    caption: str
    of: Callable[[Summary], float | None]


def _per_sample(total: float | None, summary: Summary) -> float | None:
    return None if total is None or not summary.sample_count else total / summary.sample_count


AXES = (
    Axis(
        "Accuracy and chain length",
        "mean chain (tokens)",
        "Up and to the left is better.",
        lambda s: s.thinking_tokens_mean,
    ),
    Axis(
        "Accuracy and KV memory",
        "KV memory held over steps, a sample (GB x steps)",
        "KV bytes held through each step, summed over the task's steps, over its samples: the "
        "machine's speed doesn't enter.",
        lambda s: _per_sample(None if s.kv_byte_steps is None else s.kv_byte_steps / 1e9, s),
    ),
    Axis(
        "Accuracy and time",
        "wall clock of the task, a sample (s)",
        "Samples run side by side, so this is the task's wall clock over their number, not what "
        "one sample waits.",
        lambda s: _per_sample(s.wall_seconds, s),
    ),
)


def accuracy_plot(runs: Sequence[Run], axis: Axis, prefix: str) -> Plot:
    """A point for each task of each run, with its interval; those without a figure left out.

    `prefix` keeps the ids of one plot apart from those of the page's others.
    """
    tasks = list(dict.fromkeys(task for run in runs for task in run.tasks))
    markers = dict(zip(tasks, cycle(_MARKERS), strict=False))
    left_out = []
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 4.4), layout="constrained")
        axes = figure.add_subplot(xlabel=axis.label, ylabel="accuracy (%)")
        for run, color in zip(runs, cycle(_COLORS), strict=False):
            for task, summary in run.tasks.items():
                name = _printable(run.name if len(tasks) == 1 else f"{run.name}, {task}")
                x = axis.of(summary)
                if x is None or math.isnan(x) or not figures.graded(summary):
                    left_out.append(name)
                else:
                    _point(axes, summary, x, f" {name}", color + markers[task])
        drawn = len(axes.containers) > 0
        if drawn:
            axes.margins(0.1, 0.1)
            axes.set_xlim(left=0)
            axes.grid(alpha=0.15, color=_INK)
            figure.legend(loc="outside lower left", ncols=2)
    caption = f"{axis.caption} Bars are 95 % intervals of accuracy."
    if left_out:
        caption += f" Left out, for want of the figure: {'; '.join(left_out)}."
    return Plot(axis.title, _svg(figure, prefix) if drawn else None, caption)


def _point(axes: Axes, summary: Summary, x: float, label: str, style: str) -> None:
    """`label` starts with a blank: matplotlib hides labels that start with an underscore."""
    low, high = (100 * end for end in summary.accuracy_ci)
    y = 100 * summary.accuracy
    bars = [[max(0.0, y - low)], [max(0.0, high - y)]]
    color, marker = style[:-1], style[-1]
    axes.errorbar(x, y, bars, color=color, marker=marker, markersize=7, capsize=3, label=label)


def chain_plot(runs: Sequence[Run], task: str, prefix: str) -> Plot:
    """Chain lengths of one task: a histogram for each run, all on one axis of tokens."""
    chains = [(run, _chains(run, task)) for run in runs if task in run.tasks]
    title = f"Chain lengths: {task}"
    longest = max((s.thinking_tokens for _, samples in chains for s in samples), default=None)
    if longest is None:
        return Plot(title, None, "No sample finished.")
    end = max(longest, *(_limit(run) or 0 for run, _ in chains), 1)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 0.9 + 1.6 * len(chains)), layout="constrained")
        grid = figure.subplots(len(chains), sharex=True, squeeze=False)[:, 0]
        for axes, (run, samples) in zip(grid, chains, strict=True):
            _histogram(axes, samples, end, _limit(run))
            axes.set_title(_printable(run.name), loc="left", fontsize=10)
            axes.set_ylabel("samples")
        grid[-1].set_xlabel("chain (tokens)")
        handles, labels = grid[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=4)
    caption = (
        "How many samples have a chain of that length. Unanswered counts as wrong; the dashed line "
        "is the limit on output tokens, which a chain shares with its answer."
    )
    return Plot(title, _svg(figure, prefix), caption)


def _chains(run: Run, task: str) -> list[Sample]:
    return [s for s in run.samples if s.task == task and s.verdict != "error"]


def _limit(run: Run) -> int | None:
    limit = run.settings.get("max_tokens")
    return limit if isinstance(limit, int) else None


def _histogram(axes: Axes, samples: Sequence[Sample], end: int, limit: int | None) -> None:
    kinds = {
        "right": ("#0072b2", [s.thinking_tokens for s in samples if s.right]),
        "wrong": ("#d55e00", [s.thinking_tokens for s in samples if s.graded and not s.right]),
        "not graded": ("#999999", [s.thinking_tokens for s in samples if not s.graded]),
    }
    colors, lengths = zip(*kinds.values(), strict=True)
    axes.hist(
        lengths, bins=_BINS, range=(0, end), stacked=True, color=colors, label=list(kinds), rwidth=1
    )
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlim(0, end * 1.02)
    if limit is not None:
        axes.axvline(limit, color=_INK, linestyle="--", linewidth=1, label="limit")


def _printable(name: str) -> str:
    """What XML and fonts can hold."""
    return "".join(char if char.isprintable() else "?" for char in name)


def _svg(figure: Figure, prefix: str) -> str:
    """The figure as an element of a page: no declaration, metadata, namespaces or style sheet
    of its own, and every id with `prefix`."""
    buffer = io.BytesIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": prefix}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {
            _local(name): _attribute(_local(name), value, prefix)
            for name, value in element.attrib.items()
        }
    for name in ("width", "height"):  # the page's style decides
        del root.attrib[name]
    return ET.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _attribute(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return value.replace("#", f"#{prefix}-", 1)
    return re.sub(r"url\(#", f"url(#{prefix}-", value).replace(_INK, "currentColor")
