"""Loops: where a chain repeats itself, token by token. Pure and rewindable.

A loop is an exact cycle at the end of the tokens: the last `copies` runs of `period` tokens are
the same, and the cycle covers at least `least_tokens`, so that a short refrain ("no, no, no") is
none. Whatever follows a cycle ends it, an end-of-sequence token too: a caller who asks about a
finished output takes that token off first.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSpec:
    """What counts as a loop; `every` is how many tokens a detector feeds between its checks."""

    max_period: int = 256
    copies: int = 3
    least_tokens: int = 48
    every: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 2 if field.name == "copies" else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{field.name} must be an integer of at least {least}, not {value!r}"
                )

    def needs(self, period: int) -> int:
        """Tokens that a cycle of this period has to cover."""
        return max(self.copies * period, self.least_tokens)


@dataclass(frozen=True, slots=True)
class Loop:
    """A cycle at the end of some tokens.

    `period` is the smallest that makes a loop. `start` is the first index from which on every
    token equals the one a period later (if there is one), so the copies counted from there may end
    with a part of one.
    """

    start: int
    period: int


_DEFAULT = LoopSpec()


def find_loop(tokens: Sequence[int], spec: LoopSpec = _DEFAULT) -> Loop | None:
    """The loop in which the tokens end. One that was left again is none."""
    period = _period(tokens, spec)
    return None if period is None else Loop(_start(tokens, period, spec), period)


@cache
def _shortest_repeat(spec: LoopSpec) -> int:
    """How many last tokens any loop repeats one period before."""
    return min(spec.needs(period) - period for period in range(1, spec.max_period + 1))


def _period(tokens: Sequence[int], spec: LoopSpec) -> int | None:
    """The smallest period of a loop at the end: the end read backwards, as bytes, because a search
    for where its first tokens come again leaves few periods to try."""
    if len(tokens) < spec.least_tokens:
        return None
    back = array("q", tokens[: -spec.needs(spec.max_period) - 1 : -1])
    data, width, repeat = back.tobytes(), back.itemsize, _shortest_repeat(spec)
    longest = min(spec.max_period, len(back) // spec.copies)
    head, last, at = data[: width * repeat], width * (longest + repeat), 0
    while (at := data.find(head, at + 1, last)) > 0:
        period, inside_a_token = divmod(at, width)
        end = width * spec.needs(period)
        if not inside_a_token and data[at:end] == data[: end - at]:
            return period
    return None


def _start(tokens: Sequence[int], period: int, spec: LoopSpec) -> int:
    start = len(tokens) - spec.needs(period)
    while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
        start -= 1
    return start


class LoopDetector:
    """Follows one growing sequence; looks at every `every`-th token, counted from its first.

    So a loop is seen at most `every - 1` tokens late, and one that is left sooner not at all. It
    keeps every token that it was fed, which is what makes rewinding exact.
    """

    def __init__(self, spec: LoopSpec = _DEFAULT) -> None:
        self._spec = spec
        self._fed = array("q")
        self._found: Loop | None = None  # by the last check; its start needn't be sought again

    def feed(self, token: int) -> Loop | None:
        """The next token; the loop in which the sequence ends now, if this is a token to check."""
        self._fed.append(token)
        if len(self._fed) % self._spec.every:
            return None
        before, period = self._found, _period(self._fed, self._spec)
        if period is None:
            self._found = None
        elif before is None or not self._goes_on(before, period):
            self._found = Loop(_start(self._fed, period, self._spec), period)
        return self._found

    def _goes_on(self, before: Loop, period: int) -> bool:
        """Whether this is the loop of the check before: the same period, and the two cycles share
        a copy."""
        shared = self._spec.needs(period) - self._spec.every
        return period == before.period and shared >= period

    def rewind(self, count: int) -> None:
        """Only the first `count` tokens are left, counted from the first that was ever fed."""
        if count < len(self._fed):
            self._found = None
            del self._fed[count:]

    def fork(self) -> LoopDetector:
        """A detector that has seen the same tokens and goes its own way."""
        twin = LoopDetector(self._spec)
        twin._fed, twin._found = self._fed[:], self._found
        return twin
