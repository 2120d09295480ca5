"""Who else uses the CPUs: what the whole machine spends, less what our own processes do."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

QUIET_CPUS = 0.1
"""Other processes that use less than this many CPUs don't count."""

_TICKS = os.sysconf("SC_CLK_TCK")
_SHORTEST_SECONDS = 0.3  # the machine counts in hundredths of a second


def _machine_seconds() -> float:
    """Busy time of all CPUs, stolen time included: that is a neighbour's too."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, soft, steal = map(int, fields[:8])
    return (user + nice + system + irq + soft + steal) / _TICKS


def _our_seconds() -> float:
    """Of this process and of children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Meter:
    """Over its lifetime, how many CPUs processes used that aren't ours.

    `living` tells the CPU seconds of our children that haven't ended yet.
    """

    def __init__(self, living: Callable[[], float]) -> None:
        self._living = living
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), _machine_seconds(), _our_seconds() + self._living()

    def others_cpus(self) -> float | None:
        """None where too little time has passed to tell."""
        wall, machine, ours = (
            now - before for now, before in zip(self._now(), self._start, strict=True)
        )
        if wall < _SHORTEST_SECONDS:
            return None
        return max(0.0, (machine - ours) / wall)


def others_now(seconds: float = 1.0) -> float:
    """While nothing of ours runs."""
    meter = Meter(lambda: 0.0)
    time.sleep(seconds)
    return meter.others_cpus() or 0.0


def wait_until_quiet(
    limit_seconds: float,
    measure: Callable[[], float] = others_now,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Returns as soon as the others are quiet, or what they still use at the limit."""
    end = clock() + limit_seconds
    while (used := measure()) > QUIET_CPUS and clock() < end:
        pass
    return used
