"""The race's outcome for a terminal and for a README: ratios first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bench.common import Spread
from bench.peers import arithmetic
from bench.peers.busy import QUIET_CPUS
from bench.peers.record import Record
from bench.peers.regimes import REGIMES, Regime
from bench.peers.taut import NAME as TAUT

_HEAD = ("regime", "Taut / best peer", "Taut", "best peer", "rounds")


def outcome(record: Record) -> Group:
    """Rows of the best, then every configuration, then what is to be known of it."""
    parts: list[RenderableType] = [_table(_HEAD, list(_rows(record)))]
    for name, rounds in record.rounds.items():
        regime = REGIMES[name]
        parts.append(Text(f"{regime.title}, {_unit(regime)}", style="bold"))
        parts.append(_table(("configuration", "median (ends)", "Taut / it"), _all(regime, rounds)))
    parts += [Text(note, style="yellow") for note in notes(record)]
    return Group(*parts)


def markdown(record: Record) -> str:
    """The rows of the best and the notes."""
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    lines += [f"| {' | '.join(cells)} |" for cells in _rows(record)]
    said = notes(record)
    return "\n".join([*lines, *([""] if said else []), *(f"* {note}" for note in said)]) + "\n"


def notes(record: Record) -> list[str]:
    """Who failed, where other processes ran, and what `Taut / it` can't say."""
    found = []
    for name, rounds in record.rounds.items():
        used = arithmetic.others(rounds)
        busy = [each for each in used if each > QUIET_CPUS]
        if busy:
            found.append(
                f"{name}: other processes used up to {max(busy):.2f} CPUs, more than {QUIET_CPUS} "
                f"in {len(busy)} of {len(used)} measurements"
            )
        found += [f"{name}: {label} is out: {why}" for label, why in record.failures[name].items()]
    return found


def _rows(record: Record) -> Iterator[list[str]]:
    for name, rounds in record.rounds.items():
        regime = REGIMES[name]
        row, figures = arithmetic.row(regime, rounds), arithmetic.figures(rounds)
        yield [
            f"{regime.title} ({_unit(regime)})",
            "-" if row.ratio is None else _ratio(row.ratio),
            *(
                "-" if label is None else f"{_short(label)} {_figure(figures[label])}"
                for label in (row.taut, row.peer)
            ),
            str(len(rounds)),
        ]


def _all(regime: Regime, rounds: arithmetic.Rounds) -> list[list[str]]:
    """Every configuration, the best first."""
    figures = arithmetic.figures(rounds)
    ours = arithmetic.row(regime, rounds).taut
    ordered = sorted(figures, key=lambda label: figures[label].median)
    if regime.how.better == "higher":
        ordered.reverse()
    return [[label, _figure(figures[label]), _beside(rounds, ours, label)] for label in ordered]


def _beside(rounds: arithmetic.Rounds, ours: str | None, label: str) -> str:
    if ours is None or label == ours:
        return ""
    ratio = arithmetic.ratios(rounds, ours, label)
    return "-" if ratio is None else _ratio(ratio)


def _short(label: str) -> str:
    """Taut's own name is the column's."""
    return label.removeprefix(f"{TAUT}:")


def _unit(regime: Regime) -> str:
    lower = regime.how.better == "lower"
    return f"{regime.how.unit}, lower is better" if lower else regime.how.unit


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.min:.2f} to {ratio.max:.2f})"


def _figure(figure: Spread) -> str:
    return f"{_number(figure.median)} ({_number(figure.min)} to {_number(figure.max)})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
