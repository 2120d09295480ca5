"""From laps to figures: medians with their ends, and ratios taken round by round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bench.common import Spread, spread
from bench.peers.match import Lap
from bench.peers.regimes import Regime
from bench.peers.taut import NAME as TAUT

Rounds = Sequence[Mapping[str, Lap]]
"""Of one regime: each round's laps by label."""


class Row(NamedTuple):
    """A regime's outcome: Taut's best configuration beside the best of the peers'.

    `ratio` is Taut's figure divided by the peer's. Parts are None where nothing was measured.
    """

    regime: Regime
    taut: str | None
    peer: str | None
    ratio: Spread | None


def figures(rounds: Rounds) -> dict[str, Spread]:
    """By label, over the rounds in which it has a lap."""
    return {label: spread(values) for label, values in _values(rounds).items()}


def ratios(rounds: Rounds, above: str, below: str) -> Spread | None:
    """Of two labels, over the rounds that have both: a ratio each, then the spread of those."""
    both = [laps for laps in rounds if above in laps and below in laps]
    if not both:
        return None
    return spread([laps[above].value / laps[below].value for laps in both])


def best(regime: Regime, found: Mapping[str, Spread], labels: Iterable[str]) -> str | None:
    """The label with the best median."""
    measured = [label for label in labels if label in found]
    if not measured:
        return None
    pick = max if regime.how.better == "higher" else min
    return pick(measured, key=lambda label: found[label].median)


def row(regime: Regime, rounds: Rounds) -> Row:
    found = figures(rounds)
    ours = best(regime, found, [label for label in found if is_taut(label)])
    theirs = best(regime, found, [label for label in found if not is_taut(label)])
    ratio = None if ours is None or theirs is None else ratios(rounds, ours, theirs)
    return Row(regime, ours, theirs, ratio)


def is_taut(label: str) -> bool:
    return label.partition(":")[0] == TAUT


def agreement(rounds: Rounds, label: str, reference: str) -> float | None:
    """How many leading tokens two labels' greedy outputs share, the median over rounds."""
    shared = [
        _shared(laps[label].tokens or (), laps[reference].tokens or ())
        for laps in rounds
        if label in laps and reference in laps and laps[label].tokens and laps[reference].tokens
    ]
    return statistics.median(shared) if shared else None


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for count, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return count
    return min(len(one), len(other))


def others(rounds: Rounds) -> list[float]:
    """CPUs that other processes used, of every lap that was long enough to tell."""
    used = [lap.others_cpus for laps in rounds for lap in laps.values()]
    return [each for each in used if each is not None]


def _values(rounds: Rounds) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {}
    for laps in rounds:
        for label, lap in laps.items():
            values.setdefault(label, []).append(lap.value)
    return values
