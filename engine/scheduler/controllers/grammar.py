"""Answers of a given form: a rule that follows the grammar's matcher, once the thinking is over.

The chain of thought is free; the form begins with the first token behind it. Where a model may
still open its thinking, at the very beginning of its output, the start marker is allowed besides.
In the answer markers are forbidden: inside a JSON string they would be legal text, but would turn
what follows into thinking.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.request import Finish, LogitsRule, Mask, Matcher, Sequence
from engine.scheduler.controller import Controller, Edit, TokenEvent, Watch
from engine.scheduler.reasoning import Markers, ThinkingTracker, ends_with, last_marker


@dataclass(frozen=True, kw_only=True)
class Grammars(Controller):
    """Constrains the sequences that bring a matcher; ends them when their form is complete."""

    markers: Markers

    def watch(self) -> GrammarWatch:
        return GrammarWatch(self.markers)


class GrammarWatch(Watch):
    """Follows one sequence, if it has a grammar."""

    _rule: GrammarRule | None = None

    def __init__(self, markers: Markers) -> None:
        self._markers = markers

    def begin(self, seq: Sequence) -> None:
        if seq.matcher is not None:
            self._rule = GrammarRule(seq.matcher, self._markers, seq.tokens)

    def rules(self, seq: Sequence) -> tuple[LogitsRule, ...]:
        return () if self._rule is None else (self._rule,)

    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        done = self._rule is not None and self._rule.read(seq.tokens)
        return Edit(finish=Finish("stop")) if done else None


class GrammarRule:
    """The matcher, and which of the sequence's tokens it has taken.

    It reads new tokens whenever it is asked, so a fork needs to hear of nothing.
    """

    def __init__(self, matcher: Matcher, markers: Markers, prompt: Seq[int]) -> None:
        self._matcher = matcher
        self._markers = markers
        self._begin = self._len = len(prompt)
        self._chain = ThinkingTracker(markers, prompt) if markers.end else None
        self._taken: list[int] = []  # positions
        self._foreign: int | None = None  # the position of a token that the grammar forbids
        self._opens = self._opening(prompt)

    def _opening(self, prompt: Seq[int]) -> tuple[int, ...]:
        """The start marker, if the output may begin with it; not where the grammar may."""
        start = self._markers.start
        if not start or self._thinking or last_marker(self._markers, prompt) is not None:
            return ()
        return () if _has(self._matcher.mask(), start[0]) else start

    @property
    def _thinking(self) -> bool:
        return self._chain is not None and self._chain.thinking

    @property
    def _opened(self) -> int | None:
        """How much of the start marker is there already; None: it may no longer come."""
        length = self._len - self._begin
        return length if not self._taken and length < len(self._opens) else None

    def read(self, tokens: Seq[int]) -> bool:
        """All that is new; whether the form is complete."""
        for position in range(self._len, len(tokens)):
            self._read(tokens[position], position)
        return not self._thinking and self._foreign is None and self._matcher.done

    def _read(self, token: int, position: int) -> None:
        opened, thought = self._opened, self._thinking
        self._len += 1
        if self._chain is not None:
            self._chain.feed(token)
        if thought or self._thinking or self._foreign is not None:
            return
        if opened is not None and token == self._opens[opened]:
            return
        if self._matcher.accept(token):
            self._taken.append(position)
        else:
            self._foreign = position

    def mask(self, tokens: Seq[int]) -> Mask | None:
        self.read(tokens)
        if self._thinking:
            return None
        if self._foreign is not None:
            raise ValueError(
                f"token {tokens[self._foreign]} at position {self._foreign} was forced into the "
                "answer, and the grammar doesn't allow it"
            )
        opened = self._opened
        if opened:
            return Mask(allow=(self._opens[opened],))
        bits = self._matcher.mask()
        ban = [
            marker[-1]
            for marker in (self._markers.start, self._markers.end)
            if marker and (len(marker) == 1 or ends_with(tokens, marker[:-1]))
        ]
        if opened is None:
            return Mask(allow_bits=bits, ban=ban)
        return Mask(
            allow_bits=_with(bits, self._opens[0]),
            ban=[token for token in ban if token != self._opens[0]],
        )

    def fork(self) -> GrammarRule:
        twin = object.__new__(GrammarRule)
        twin._matcher = self._matcher.fork()
        twin._markers, twin._opens = self._markers, self._opens
        twin._begin, twin._len = self._begin, self._len
        twin._chain = None if self._chain is None else self._chain.fork()
        twin._taken, twin._foreign = self._taken.copy(), self._foreign
        return twin

    def rewind(self, pos: int) -> None:
        if pos >= self._len:
            return
        self._len = pos
        if self._chain is not None:
            self._chain.rewind(pos)
        kept = len(self._taken)
        while kept and self._taken[kept - 1] >= pos:
            kept -= 1
        self._matcher.rewind(len(self._taken) - kept)
        del self._taken[kept:]
        if self._foreign is not None and self._foreign >= pos:
            self._foreign = None


def _has(bits: bytes, token: int) -> bool:
    return token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1)


def _with(bits: bytes, token: int) -> bytes:
    more = bytearray(bits)
    more[token // 8] |= 1 << token % 8
    return bytes(more)
