"""Engines in this process, that write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.match import Lap
from bench.peers.peer import Job, PeerError, Prompts, Runner, Timing

Event = tuple[str, str]  # label, what


@dataclass
class Track:
    """All engines' events in order, and who is awake."""

    events: list[Event] = field(default_factory=list)
    awake: set[str] = field(default_factory=set)
    prompts: dict[str, list[Prompts]] = field(default_factory=dict)
    wanted: dict[str, list[int]] = field(default_factory=dict)

    def of(self, what: str) -> list[str]:
        return [label for label, event in self.events if event == what]


class FakeRunner(Runner):
    """`seconds` of each call; `fails` at the call of that number, 0 being the start."""

    def __init__(
        self, label: str, track: Track, seconds: Iterator[float], fails: int | None = None
    ) -> None:
        self._label = label
        self._track = track
        self._seconds = seconds
        self._fails = fails
        self._calls = 0

    def _happens(self, what: str) -> None:
        self._track.events.append((self._label, what))

    def _may_fail(self) -> None:
        if self._calls == self._fails:
            raise PeerError("it fell over")

    def start(self) -> None:
        assert not self._track.awake, "another engine runs while this one loads"
        self._happens("start")
        self._may_fail()
        self._track.awake.add(self._label)
        self.about = {"versions": {self._label: "1"}}

    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        assert self._track.awake == {self._label}, "two engines run"
        self._calls += 1
        self._happens("generate")
        self._may_fail()
        self._track.prompts.setdefault(self._label, []).append(prompts)
        self._track.wanted.setdefault(self._label, []).append(output_tokens)
        return Timing(next(self._seconds), tokens=tuple(range(output_tokens)))

    def pause(self) -> None:
        self._happens("pause")
        self._track.awake.discard(self._label)

    def resume(self) -> None:
        self._happens("resume")
        self._track.awake.add(self._label)

    def cpu_seconds(self) -> float:
        return 0.0

    def peak_bytes(self) -> int:
        return 3 << 20

    def close(self) -> None:
        self._happens("close")
        self._track.awake.discard(self._label)


def lap(value: float, others_cpus: float | None = 0.0, *tokens: int) -> Lap:
    return Lap(value, 1.0, others_cpus, tokens or None)


def job(folder: Path, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "model": folder / "model",
        "streams": 2,
        "prompt_tokens": 3,
        "output_tokens": 4,
        "threads": 1,
        "timeout": 30.0,
        "log": folder / "log",
    }
    return Job(**{**values, **changes})
