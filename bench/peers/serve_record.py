"""A race of servers on disk as it goes: the same command goes on from the last complete round."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import environment, spread
from bench.peers.arithmetic import is_taut
from bench.peers.match import Entry
from bench.peers.record import (
    VERSION,
    check_same,
    reading,
    stored,
    without_folders,
    write_whole,
)

FIGURES: Mapping[str, str] = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
}
"""The first: higher is better; of the others, lower."""

Round = Mapping[str, Mapping[str, float]]
"""By label, then figure."""


class ServeRecord:
    """By number of clients. ValueError: no record is there, or one of other settings."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.rounds: dict[int, list[Round]] = {}
        self.failures: dict[int, dict[str, str]] = {}  # by label
        self.about: dict[int, dict[str, Any]] = {}  # by label: flags follow the clients
        self.environments: list[dict[str, Any]] = []  # of each sitting
        if path is not None and path.exists():
            self._read(path)
        self.environments.append(environment())

    def _read(self, path: Path) -> None:
        with reading(path):
            held = stored(path)
            theirs = held["settings"]
            for count, part in held["clients"].items():
                clients = int(count)
                self.rounds[clients] = list(part["rounds"])
                self.failures[clients] = dict(part["failures"])
                self.about[clients] = dict(part["about"])
            self.environments = held["environments"]
        check_same(path, theirs, self.settings)

    def forget(self, clients: int) -> None:
        """So that it is raced again."""
        for held in (self.rounds, self.failures, self.about):
            held.pop(clients, None)

    def done(self, clients: int) -> int:
        """Complete rounds."""
        return len(self.rounds.get(clients, []))

    def add(self, clients: int, made: Round, entries: Sequence[Entry]) -> None:
        """A complete round, and who is out by now."""
        self.rounds.setdefault(clients, []).append(made)
        self.note(clients, entries)

    def note(self, clients: int, entries: Sequence[Entry]) -> None:
        self.rounds.setdefault(clients, [])
        out = self.failures.setdefault(clients, {})
        about = self.about.setdefault(clients, {})
        for entry in entries:
            if entry.failure is not None:
                out[entry.label] = without_folders(entry.failure)
            if entry.about:
                about[entry.label] = entry.about
        if self._path is not None:
            write_whole(self._path, self._plain())

    def _plain(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "settings": self.settings,
            "environments": self.environments,
            "clients": {
                str(clients): {
                    "ratios": ratios(rounds),
                    "failures": self.failures[clients],
                    "about": self.about[clients],
                    "rounds": rounds,
                }
                for clients, rounds in self.rounds.items()
            },
        }


def ratios(rounds: Sequence[Round]) -> dict[str, dict[str, dict[str, Any]]]:
    """Taut's figure by the peer's, round by round: of each pair, by figure."""
    labels = dict.fromkeys(label for made in rounds for label in made)
    ours = [label for label in labels if is_taut(label)]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for our in ours:
        for their in (label for label in labels if label not in ours):
            both = [made for made in rounds if our in made and their in made]
            if both:
                found[f"{our} / {their}"] = {
                    name: spread([made[our][name] / made[their][name] for made in both])._asdict()
                    for name in FIGURES
                }
    return found
