"""Where thoughts end. Pure and rewindable.

A thought ends at the token that completes a blank line (however many newlines follow, the boundary
is one), at the end marker of the thinking, and at the end of the sequence. Text of white space
and a start marker alone is no thought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.scheduler.match import Pattern
from engine.scheduler.reasoning import Markers, ends_with


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How boundaries are told; makes a tracker for each sequence."""

    token_bytes: Callable[[int], bytes]
    boundary: bytes = b"\n\n"
    markers: Markers = field(default_factory=Markers)

    def tracker(self) -> ThoughtTracker:
        return ThoughtTracker(self)


class ThoughtTracker:
    """Follows one sequence's generated tokens, counted from where the tracker began."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._pattern = Pattern(thoughts.boundary)
        self._fed: list[int] = []
        # after each token: 2 * (bytes of the boundary matched) + (whether the thought has content)
        self._states = [0]
        self._kept = 0  # tokens from before it began

    def check(self, tokens: Iterable[int]) -> None:
        """ValueError: a token that the vocabulary doesn't have."""
        for token in tokens:
            self._thoughts.token_bytes(token)

    def feed(self, token: int) -> bool:
        """The next token; whether a thought ends with it."""
        data = self._thoughts.token_bytes(token)
        matched, content = divmod(self._states[-1], 2)
        matched, end = self._pattern.scan(matched, data)
        self._fed.append(token)
        markers = self._thoughts.markers
        ends = False
        if ends_with(self._fed, markers.end):
            ends, content = bool(content), 0
        elif ends_with(self._fed, markers.start):
            content = self._states[-len(markers.start)] % 2  # the marker itself is none
        elif end is not None:
            ends, content = bool(content or data[:end].strip()), bool(data[end:].strip())
        else:
            content = content or bool(data.strip())
        self._states.append(2 * matched + content)
        return ends

    def close(self) -> bool:
        """The sequence is over; whether that ends a thought."""
        content = bool(self._states[-1] % 2)
        self._states[-1] -= content
        return content

    def rewind(self, count: int) -> None:
        """Only the first `count` tokens that were fed since it began are left."""
        del self._fed[self._kept + count :], self._states[self._kept + count + 1 :]

    def fork(self) -> ThoughtTracker:
        """A tracker that begins here; it keeps what a marker under way needs."""
        twin = ThoughtTracker(self._thoughts)
        markers = self._thoughts.markers
        twin._kept = min(len(self._fed), max(len(markers.start), len(markers.end)))
        begin = len(self._fed) - twin._kept
        twin._fed, twin._states = self._fed[begin:], self._states[begin:]
        return twin
