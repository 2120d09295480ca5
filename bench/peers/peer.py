"""What the race knows of an engine: configurations, and a runner for each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import ROOT

PEERS_FOLDER = ROOT / "build" / "peers"

Prompts = Sequence[Sequence[int]]


class PeerError(Exception):
    """An engine can't be had, died, hung, or answered wrongly; the message is for a reader."""


class Timing(NamedTuple):
    """Of one call: all prompts to their last token.

    `first_seconds`: until the first token of every stream, where the engine says so. `tokens` are
    the first stream's, where the engine made any from its prompt.
    """

    seconds: float
    first_seconds: float | None = None
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run an engine. `label` names it in results: "llamacpp:q4_0".

    `bits` is what most weights take (block scales aside), `files` names what of `models.py` it
    reads, `settings` go to the engine's runner.
    """

    peer: str
    name: str
    bits: int
    files: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    default: bool = True  # taken when only the peer is named
    starts_cold: bool = True  # a fresh process of it shows when the first token comes

    @property
    def label(self) -> str:
        return f"{self.peer}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a runner is started for: sizes are the regime's, so that caches can be sized alike."""

    model: Path
    streams: int
    prompt_tokens: int
    output_tokens: int
    threads: int
    timeout: float  # seconds that loading, or one call, may take
    log: Path  # what the engine prints

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Runner(ABC):
    """A running engine; made but not started. Every method may raise PeerError."""

    about: Mapping[str, Any] = {}
    """Versions and flags as the engine says them, once it is started."""

    @abstractmethod
    def start(self) -> None:
        """Load the model; returns when prompts can be run."""

    @abstractmethod
    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        """Run all prompts at once, greedily, past any end of sequence."""

    @abstractmethod
    def pause(self) -> None:
        """Until `resume` it uses no CPU."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def cpu_seconds(self) -> float:
        """Used so far by what is running now."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most memory held so far, of all its processes together."""

    @abstractmethod
    def close(self) -> None:
        """End it, whatever state it is in. Never raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine."""

    name: str
    configurations: tuple[Configuration, ...]
    runner: Callable[[Configuration, Job], Runner]

    def chosen(self, name: str | None) -> list[Configuration]:
        """The one of that name, or the defaults; ValueError lists what there is."""
        if name is None:
            return [each for each in self.configurations if each.default]
        found = [each for each in self.configurations if each.name == name]
        if not found:
            names = ", ".join(each.name for each in self.configurations)
            raise ValueError(f"{self.name} has no configuration {name!r}; it has {names}")
        return found
