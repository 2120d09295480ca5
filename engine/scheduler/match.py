"""Incremental search for one byte pattern (Knuth-Morris-Pratt).

The whole state is one small int, how many of the pattern's bytes the text's end matches, so a
tracker that keeps one a token can be rewound by cutting a list.
"""

from __future__ import annotations

from typing import NamedTuple


class Scan(NamedTuple):
    """State after some bytes, and where in them (just after its last byte) a match ended first."""

    state: int
    end: int | None


class Pattern:
    """A pattern and its failure table; it holds no text."""

    __slots__ = ("_fail", "pattern")

    def __init__(self, pattern: bytes) -> None:
        assert pattern
        self.pattern = pattern
        self._fail = [0, 0]  # of each matched length, the longest proper prefix that is its suffix
        for symbol in pattern[1:]:
            self._fail.append(self._step(self._fail[-1], symbol))

    def _step(self, state: int, symbol: int) -> int:
        while state and self.pattern[state] != symbol:
            state = self._fail[state]
        return state + 1 if self.pattern[state] == symbol else 0

    def step(self, state: int, symbol: int) -> int:
        """The state after one more byte; `len(pattern)` is a match, and the search may go on."""
        return self._step(self._fail[state] if state == len(self.pattern) else state, symbol)

    def scan(self, state: int, data: bytes) -> Scan:
        """All of `data`; the first match ends the look-out, not the scan."""
        if state == 0 and self.pattern[0] not in data:
            return Scan(0, None)
        first = None
        for at, symbol in enumerate(data, 1):
            state = self.step(state, symbol)
            if first is None and state == len(self.pattern):
                first = at
        return Scan(state, first)
