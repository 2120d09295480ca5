"""A race on disk as it goes: the same command goes on from the last complete round."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.common import environment
from bench.peers import arithmetic
from bench.peers.match import Entry, Lap
from bench.peers.regimes import REGIMES, Regime

VERSION = 1
_FOLDERS = re.compile(r"(/[\w.+-]+)+/")  # files are named, not where they lie


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What goes wrong inside becomes ValueError: `path` holds no record."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no record of a race ({error!r}): move it away") from error


def stored(path: Path) -> dict[str, Any]:
    held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if held["version"] != VERSION:
        raise ValueError(f"version {held['version']!r}")
    return held


def check_same(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """ValueError: a race with other settings can't go on there."""
    other = [
        f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} now"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    ]
    if other:
        raise ValueError(
            f"{path} is of a race with other settings ({'; '.join(other)}): give those, "
            "another --json, or move it away"
        )


def write_whole(path: Path, plain: Mapping[str, Any]) -> None:
    """Or not at all."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)


def without_folders(text: str) -> str:
    return _FOLDERS.sub("", text)


class Record:
    """ValueError: what is there is no record, or one of a race with other settings."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.rounds: dict[str, list[dict[str, Lap]]] = {}
        self.failures: dict[str, dict[str, str]] = {}  # by regime, then label
        self.about: dict[str, dict[str, Any]] = {}  # by label
        self.environments: list[dict[str, Any]] = []  # of each sitting
        if path is not None and path.exists():
            self._read(path)
        self.environments.append(environment())

    def _read(self, path: Path) -> None:
        with reading(path):
            held = stored(path)
            theirs = held["settings"]
            for name, regime in held["regimes"].items():
                self.rounds[name] = [
                    {label: _lap(lap) for label, lap in laps.items()} for laps in regime["rounds"]
                ]
                self.failures[name] = dict(regime["failures"])
            self.about, self.environments = held["configurations"], held["environments"]
        check_same(path, theirs, self.settings)

    def forget(self, regime: Regime) -> None:
        """So that it is raced again."""
        self.rounds.pop(regime.name, None)
        self.failures.pop(regime.name, None)

    def done(self, regime: Regime) -> int:
        """Complete rounds of it."""
        return len(self.rounds.get(regime.name, []))

    def add(self, regime: Regime, laps: Mapping[str, Lap], entries: list[Entry]) -> None:
        """A complete round, and who is out by now."""
        self.rounds.setdefault(regime.name, []).append(dict(laps))
        self.note(regime, entries)

    def note(self, regime: Regime, entries: list[Entry]) -> None:
        self.rounds.setdefault(regime.name, [])
        out = self.failures.setdefault(regime.name, {})
        for entry in entries:
            if entry.failure is not None:
                out[entry.label] = without_folders(entry.failure)
            if entry.about:
                self.about[entry.label] = entry.about
        self.write()

    def write(self) -> None:
        if self._path is not None:
            write_whole(self._path, self._plain())

    def _plain(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "settings": self.settings,
            "environments": self.environments,
            "configurations": self.about,
            "regimes": {name: self._regime(name) for name in self.rounds},
        }

    def _regime(self, name: str) -> dict[str, Any]:
        regime, rounds = REGIMES[name], self.rounds[name]
        found = arithmetic.figures(rounds)
        row = arithmetic.row(regime, rounds)
        ours = [label for label in found if arithmetic.is_taut(label)]
        return {
            "title": regime.title,
            "unit": regime.how.unit,
            "better": regime.how.better,
            "figures": {label: each._asdict() for label, each in found.items()},
            "best_taut": row.taut,
            "best_peer": row.peer,
            "ratios": {
                label: {
                    other: ratio._asdict()
                    for other in found
                    if other not in ours
                    and (ratio := arithmetic.ratios(rounds, label, other)) is not None
                }
                for label in ours
            },
            "agreement_tokens": {
                label: arithmetic.agreement(rounds, label, ours[0]) for label in found if ours
            },
            "failures": self.failures[name],
            "rounds": [{label: lap._asdict() for label, lap in laps.items()} for laps in rounds],
        }


def _lap(held: Mapping[str, Any]) -> Lap:
    tokens = held["tokens"]
    return Lap(
        float(held["value"]),
        float(held["seconds"]),
        held["others_cpus"],
        None if tokens is None else tuple(tokens),
    )
