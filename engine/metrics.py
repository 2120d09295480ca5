"""Meters: what a run takes of a resource over its time."""

from __future__ import annotations

from typing import NamedTuple


class MemoryTime(NamedTuple):
    """Bytes held, summed over steps and over seconds; `side_*` is the part beside the cells, and
    `peak_bytes` the most of a step since the peak was last reset."""

    steps: int = 0
    seconds: float = 0.0
    byte_steps: int = 0
    byte_seconds: float = 0.0
    side_byte_seconds: float = 0.0
    peak_bytes: int = 0


class MemoryMeter:
    """Memory-time of one cache: what its cells and side state in use cost while steps ran.

    Time between steps isn't counted.
    """

    def __init__(self) -> None:
        self.total = MemoryTime()

    def count(self, cell_bytes: int, side_bytes: int, seconds: float) -> None:
        """One step of so many seconds, through which so much was held."""
        held, total = cell_bytes + side_bytes, self.total
        self.total = MemoryTime(
            total.steps + 1,
            total.seconds + seconds,
            total.byte_steps + held,
            total.byte_seconds + held * seconds,
            total.side_byte_seconds + side_bytes * seconds,
            max(total.peak_bytes, held),
        )

    def reset_peak(self) -> None:
        self.total = self.total._replace(peak_bytes=0)
