"""One regime, all engines: warmed up, then measured in turn, round after round.

Only one engine runs at a time; the others are stopped. What fails is out of this regime with its
reason, and the rest goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from bench.peers.busy import Meter
from bench.peers.peer import PeerError, Runner, Timing
from bench.peers.prompts import Windows
from bench.peers.regimes import Regime
from engine.host import available_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

WARM_UP_TOKENS = 8
CALLS_A_ROUND = 8  # prompts are set aside for so many


class Lap(NamedTuple):
    """One engine's figure in one round."""

    value: float
    seconds: float  # that measuring took
    others_cpus: float | None  # used by other processes meanwhile
    tokens: tuple[int, ...] | None  # the first output of the call that made most


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """`spare_bytes`: an engine that would leave less free memory isn't kept between its laps."""

    rounds: int
    spare_bytes: int
    before_round: Callable[[], None] = lambda: None


class Entry:
    """One configuration in one regime.

    `open_runner` makes a new runner, not started; `facts` are told beside what the engine says.
    """

    def __init__(
        self,
        label: str,
        open_runner: Callable[[], Runner],
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.label = label
        self._open = open_runner
        self._facts = facts
        self._runner: Runner | None = None
        self.kept = True
        self.about: dict[str, Any] = {}
        self.failure: str | None = None

    def start(self) -> Runner:
        if self._runner is None:
            self._runner = self._open()
            self._runner.start()
            self.about = {**self._facts, **self._runner.about}
        return self._runner

    @contextmanager
    def running(self) -> Iterator[Runner]:
        """Awake inside, stopped or gone outside."""
        awake = self._runner
        if awake is not None:
            awake.resume()
        runner = self.start()
        yield runner
        if self.kept:
            runner.pause()
        else:
            self.close()

    def cpu_seconds(self) -> float:
        return 0.0 if self._runner is None else self._runner.cpu_seconds()

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.close()
        log.warning("%s is out: %s", self.label, reason)


class Match:
    """A regime's entries; `laps` are of one round, by label."""

    def __init__(
        self, regime: Regime, entries: Sequence[Entry], windows: Windows, rules: Rules
    ) -> None:
        self.regime = regime
        self.entries = list(entries)
        self._windows = windows
        self._rules = rules

    def play(self, done: int) -> Iterator[dict[str, Lap]]:
        """The rounds from `done` on; one without any lap ends the match."""
        try:
            if done < self._rules.rounds:
                self._each(self._warm_up)
            for number in range(done, self._rules.rounds):
                if not self._standing:
                    return
                self._rules.before_round()
                yield self._each(partial(self._lap, round_number=number + 1))
        finally:
            for entry in self.entries:
                entry.close()

    @property
    def _standing(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.failure is None]

    def _each(self, act: Callable[[Entry], T]) -> dict[str, T]:
        made: dict[str, T] = {}
        for entry in self._standing:
            try:
                made[entry.label] = act(entry)
            except (PeerError, ValueError) as error:
                entry.fail(str(error))
        return made

    def _warm_up(self, entry: Entry) -> None:
        """Fresh processes are warmed by one that nobody measures: their files are then cached."""
        regime = self.regime
        log.info("%s: %s warms up", regime.name, entry.label)
        entry.kept = regime.how.take is not None
        with entry.running() as runner:
            self._warm(runner)
            if entry.kept and available_bytes() < self._rules.spare_bytes:
                log.info("%s is not kept between rounds: memory is short", entry.label)
                entry.kept = False

    def _warm(self, runner: Runner) -> None:
        tokens = min(self.regime.output_tokens, WARM_UP_TOKENS)
        runner.generate(self._windows.take(0), tokens)

    def _lap(self, entry: Entry, round_number: int) -> Lap:
        calls = iter(range(round_number * CALLS_A_ROUND, (round_number + 1) * CALLS_A_ROUND))
        made: list[Timing] = []
        meter = Meter(lambda: sum(each.cpu_seconds() for each in self.entries))
        start = time.perf_counter()
        value = self._measure(entry, lambda n: self._call(entry, n, next(calls), made))
        lap = Lap(
            value,
            time.perf_counter() - start,
            meter.others_cpus(),
            max((each.tokens or () for each in made), key=len, default=()) or None,
        )
        log.info("%s: round %d, %s: %.4g", self.regime.name, round_number, entry.label, value)
        return lap

    def _call(self, entry: Entry, output_tokens: int, call: int, made: list[Timing]) -> Timing:
        made.append(entry.start().generate(self._windows.take(call), output_tokens))
        return made[-1]

    def _measure(self, entry: Entry, generate: Callable[[int], Timing]) -> float:
        regime = self.regime
        start = time.perf_counter()
        with entry.running() as runner:
            if regime.how.take is not None:
                if not entry.kept:  # just started
                    self._warm(runner)
                return regime.how.take(regime, generate)
            generate(regime.output_tokens)
            seconds = time.perf_counter() - start
            return seconds if regime.measure == "cold" else runner.peak_bytes() / 2**20
