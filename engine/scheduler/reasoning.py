"""Where a chain of thought begins and ends, told by token ids. Pure and rewindable.

Two kinds of model. One marks its thinking (`<think>` ... `</think>`): thinking tokens are those
between the markers, the markers themselves not counted. The other thinks aloud: its chain is all
that comes before the last answer marker (`\\boxed{`), and everything is chain until one is seen.

A chain that was ended early ends where the closing phrase starts: the phrase was forced, not
thought, so it isn't counted, and a budget of n tokens gives exactly n.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from engine.scheduler.match import Pattern

ANSWER_MARKER = b"\\boxed{"


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """A model's thinking markers as token ids; none at all for a model that thinks aloud.

    `closing` is what ends a chain early; it ends with `end` where there is one. `opened`: every
    answer starts inside the thinking, even if the prompt's tokens don't show it. `turns` are ids
    that no thinking holds (special tokens: they part a conversation's turns), so a start marker
    before one was left open in an earlier turn, or quoted in a message.
    """

    start: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    closing: tuple[int, ...] = ()
    opened: bool = False
    turns: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.closing and self.end and self.closing[-len(self.end) :] != self.end:
            raise ValueError(f"closing {self.closing} must end with the end marker {self.end}")


class ChainTracker(Protocol):
    """Follows one sequence's generated tokens."""

    @property
    def thinking(self) -> bool:
        """Whether the chain is open."""

    @property
    def thinking_tokens(self) -> int:
        """How many generated tokens belong to chains so far."""

    def inside(self, position: int) -> bool:
        """Whether a fed token is of a chain's text, a forced closing phrase included. Takes time
        for every block that began behind it."""

    def feed(self, token: int) -> None:
        """The next token."""

    def rewind(self, pos: int) -> None:
        """Only tokens[:pos] are left; `pos` isn't below where this tracker began."""


def track_chain(
    markers: Markers, prompt: Seq[int], token_bytes: Callable[[int], bytes]
) -> ChainTracker:
    """The tracker for a model of these markers, behind this prompt."""
    if markers.end:
        return ThinkingTracker(markers, prompt)
    return AnswerTracker(markers, len(prompt), token_bytes)


def ends_with(tokens: Seq[int], tail: tuple[int, ...]) -> bool:
    # the last token alone rules out nearly every call
    return _ends_at(tokens, len(tokens), tail)


def _ends_at(tokens: Seq[int], end: int, tail: tuple[int, ...]) -> bool:
    if not tail or end < len(tail) or tokens[end - 1] != tail[-1]:
        return False
    return tuple(tokens[end - len(tail) : end]) == tail


def last_marker(markers: Markers, prompt: Seq[int]) -> Literal["start", "end"] | None:
    """Which marker the prompt's last turn has shown last: is the thinking open, over, or neither
    begun."""
    for end in range(len(prompt), 0, -1):
        if prompt[end - 1] in markers.turns:
            return None
        if _ends_at(prompt, end, markers.end):
            return "end"
        if _ends_at(prompt, end, markers.start):
            return "start"
    return None


def starts_inside(markers: Markers, prompt: Seq[int]) -> bool:
    """Whether the prompt's template has opened the thinking already."""
    return markers.opened or last_marker(markers, prompt) == "start"


class _Turn(NamedTuple):
    position: int  # just after the marker
    opened: bool
    total: int  # thinking tokens before it
    text_end: int  # where the block's text ended, if it closed


class ThinkingTracker:
    """Blocks between a start and an end marker; there may be several.

    While an end marker of several tokens is under way its first tokens count as thinking; they no
    longer do when it is complete.
    """

    def __init__(self, markers: Markers, prompt: Seq[int]) -> None:
        self._markers = markers
        keep = max(len(markers.start), len(markers.end), len(markers.closing))
        self._fed = list(prompt[-keep:])
        self._offset = len(prompt) - len(self._fed)
        self._turns = [_Turn(len(prompt), starts_inside(markers, prompt), 0, len(prompt))]

    @property
    def _len(self) -> int:
        return self._offset + len(self._fed)

    @property
    def thinking(self) -> bool:
        return self._turns[-1].opened

    @property
    def thinking_tokens(self) -> int:
        last = self._turns[-1]
        return last.total + (self._len - last.position if last.opened else 0)

    def inside(self, position: int) -> bool:
        end = self._len
        for turn in reversed(self._turns):
            if turn.position <= position:
                return turn.opened and position < end
            end = turn.text_end
        return False

    def feed(self, token: int) -> None:
        self._fed.append(token)
        last = self._turns[-1]
        if not last.opened:
            if ends_with(self._fed, self._markers.start):
                self._turns.append(_Turn(self._len, True, last.total, self._len))
        elif ends_with(self._fed, self._markers.end):
            closed = ends_with(self._fed, self._markers.closing)
            tail = len(self._markers.closing) if closed else len(self._markers.end)
            thought = max(0, self._len - tail - last.position)
            text_end = max(last.position, self._len - len(self._markers.end))
            self._turns.append(_Turn(self._len, False, last.total + thought, text_end))

    def rewind(self, pos: int) -> None:
        del self._fed[pos - self._offset :]
        while self._turns[-1].position > pos:
            self._turns.pop()

    def fork(self) -> ThinkingTracker:
        twin = ThinkingTracker(self._markers, ())
        keep = max(len(self._markers.start), len(self._markers.end), len(self._markers.closing))
        twin._fed = self._fed[-keep:]
        twin._offset = self._len - len(twin._fed)
        twin._turns = self._turns[-1:]
        return twin


class _Mark(NamedTuple):
    position: int  # just after the token that completed it
    chain_end: int
    closed: bool  # by the closing phrase: later answer markers don't lengthen the chain


class AnswerTracker:
    """A model without markers: the chain runs to the last answer marker, or to the closing phrase.

    `thinking` is whether neither has been seen.
    """

    def __init__(
        self, markers: Markers, prompt_len: int, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._closing = markers.closing
        self._token_bytes = token_bytes
        self._begin = prompt_len
        self._pattern = Pattern(ANSWER_MARKER)
        self._fed: list[int] = []
        self._states = [0]  # before each fed token, and after the last
        self._marks: list[_Mark] = []

    @property
    def thinking(self) -> bool:
        return not self._marks

    @property
    def thinking_tokens(self) -> int:
        return self._chain_end - self._begin

    @property
    def _chain_end(self) -> int:
        return self._marks[-1].chain_end if self._marks else self._begin + len(self._fed)

    def inside(self, position: int) -> bool:
        return self._begin <= position < self._chain_end

    def feed(self, token: int) -> None:
        data = self._token_bytes(token)
        self._fed.append(token)
        state, end = self._pattern.scan(self._states[-1], data)
        self._states.append(state)
        here = self._begin + len(self._fed)
        if ends_with(self._fed, self._closing):
            self._marks.append(_Mark(here, here - len(self._closing), True))
        elif end is not None and not (self._marks and self._marks[-1].closed):
            self._marks.append(_Mark(here, self._start_of_match(end), False))

    def _start_of_match(self, end: int) -> int:
        """The position of the token that holds the first byte of a match in the last token."""
        missing, back = len(ANSWER_MARKER) - end, 1
        while missing > 0 and back < len(self._fed):
            back += 1
            missing -= len(self._token_bytes(self._fed[-back]))
        return self._begin + len(self._fed) - back

    def rewind(self, pos: int) -> None:
        left = pos - self._begin
        del self._fed[left:], self._states[left + 1 :]
        while self._marks and self._marks[-1].position > pos:
            self._marks.pop()
