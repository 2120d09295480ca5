"""Where a sequence ends by its own settings: EOS, stop ids, stop strings, lengths.

Stop strings are matched in the output's bytes, across token boundaries, one small int of state a
string. Of several matches the one that ends first in the text wins, of those that end together the
longest: what a reader of single bytes would have seen, however the text is cut into tokens. A
string is looked for in the answer alone (in the thinking too with `stop_in_thinking`) and from the
`min_tokens`-th token on; a match lies whole in the part that is looked at.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import Finish, LogitsRule, SamplingParams, Sequence
from engine.scheduler.controller import Controller, Edit, TokenEvent, Watch
from engine.scheduler.match import Pattern
from engine.scheduler.reasoning import Markers, ThinkingTracker
from engine.scheduler.rules import rules_of


class Hit(NamedTuple):
    """A stop string and the bytes of text from its start, and from its end, to the text's end."""

    string: str
    from_start: int
    from_end: int


class StopStrings:
    """The state of every string's search after each token."""

    def __init__(self, strings: Seq[str]) -> None:
        self.strings = tuple(strings)
        self._patterns = tuple(Pattern(s.encode()) for s in strings)
        self._nothing = (0,) * len(self._patterns)
        self._states = [self._nothing]
        self._ends = [0]  # bytes of text up to each state

    def skip(self, data: bytes) -> None:
        """A token that isn't looked at: matches under way are over."""
        self._push(self._nothing, data)

    def feed(self, data: bytes) -> Hit | None:
        """The next token's bytes."""
        scans = [
            p.scan(state, data) for p, state in zip(self._patterns, self._states[-1], strict=True)
        ]
        self._push(tuple(scan.state for scan in scans), data)
        hits = [
            (scan.end, -len(p.pattern), string)
            for scan, p, string in zip(scans, self._patterns, self.strings, strict=True)
            if scan.end is not None
        ]
        if not hits:
            return None
        end, minus, string = min(hits)
        return Hit(string, len(data) - end - minus, len(data) - end)

    def _push(self, states: tuple[int, ...], data: bytes) -> None:
        self._states.append(states)
        self._ends.append(self._ends[-1] + len(data))

    @property
    def held_tokens(self) -> int:
        """How many of the last tokens hold text that may yet become part of a stop string."""
        under_way = max(self._states[-1], default=0)
        if under_way == 0:
            return 0
        return len(self._ends) - bisect_right(self._ends, self._ends[-1] - under_way)

    def rewind(self, count: int) -> None:
        """Only the first `count` tokens are left."""
        del self._states[count + 1 :], self._ends[count + 1 :]

    def fork(self) -> StopStrings:
        twin = StopStrings(self.strings)
        # text from before the fork may be part of a match, but is the parent's to hold back
        twin._states = self._states[-1:]
        return twin


@dataclass(frozen=True, kw_only=True)
class StopRules(Controller):
    """What ends every sequence, by the model's ids and the request's settings.

    `token_bytes` must give the bytes that the output's text gets for a token (none for a special
    token that isn't shown): stop strings and `Finish.drop_bytes` are about that text.
    """

    eos_ids: tuple[int, ...]
    max_model_len: int
    token_bytes: Callable[[int], bytes]
    markers: Markers = field(default_factory=Markers)

    def watch(self) -> StopWatch:
        return StopWatch(self)

    def branch(
        self, parent: StopWatch, append: tuple[int, ...], max_tokens: int | None
    ) -> StopWatch:
        """For a child of `parent`'s sequence that reads `append` first.

        Without `max_tokens` it may generate what its parent could. Its own params' max_tokens is
        about a whole output, so it isn't asked.
        """
        return _BranchStopWatch(self, parent, append, max_tokens)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end a sequence of these params."""
        eos = () if params.ignore_eos else self.eos_ids
        return frozenset((*eos, *params.stop_token_ids))


class StopWatch(Watch):
    """One sequence's state: where its lengths end, its stop ids and its strings' searches."""

    _ids: frozenset[int]
    limit: int
    strings: StopStrings
    chain: ThinkingTracker | None

    def __init__(self, rules: StopRules) -> None:
        self._rules = rules

    def begin(self, seq: Sequence) -> Edit | None:
        self._ids = self._rules.stop_ids(seq.params)
        self._set_up(seq)
        self._begin = len(seq.tokens)
        return self._full(len(seq.tokens))

    def _set_up(self, seq: Sequence) -> None:
        rules, max_tokens = self._rules, seq.params.max_tokens
        self.limit = rules.max_model_len
        if max_tokens is not None:
            self.limit = min(self.limit, seq.prompt_len + max_tokens)
        self.strings = StopStrings(seq.params.stop)
        self.chain = ThinkingTracker(rules.markers, seq.tokens) if rules.markers.end else None

    def _full(self, length: int) -> Edit | None:
        return Edit(finish=Finish("length")) if length >= self.limit else None

    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        hit = self._feed(seq, event.token, event.position)
        if event.token in self._ids:
            return Edit(finish=Finish("stop", event.token))
        if hit is not None:
            include = seq.params.include_stop_str_in_output
            drop = hit.from_end if include else hit.from_start
            return Edit(finish=Finish("stop", hit.string, drop))
        return self._full(event.position + 1)

    def _feed(self, seq: Sequence, token: int, position: int) -> Hit | None:
        thinking = False
        if self.chain is not None:
            thinking = self.chain.thinking
            self.chain.feed(token)
            thinking |= self.chain.thinking  # the markers are the thinking's
        if not self.strings.strings:
            return None
        data = self._rules.token_bytes(token)
        early = position + 1 - seq.prompt_len < seq.params.min_tokens
        if early or (thinking and not seq.params.stop_in_thinking):
            self.strings.skip(data)
            return None
        return self.strings.feed(data)

    def rewound(self, seq: Sequence, pos: int) -> None:
        self.strings.rewind(pos - self._begin)
        if self.chain is not None:
            self.chain.rewind(pos)

    def rules(self, seq: Sequence) -> tuple[LogitsRule, ...]:
        return rules_of(seq.params, seq.prompt_len, self._ids)

    def settled(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.strings.held_tokens


class _BranchStopWatch(StopWatch):
    """A child's: goes on from its parent's state."""

    def __init__(
        self, rules: StopRules, parent: StopWatch, append: tuple[int, ...], max_tokens: int | None
    ) -> None:
        super().__init__(rules)
        self._parent = parent
        self._append = append
        self._max_tokens = max_tokens

    def _set_up(self, seq: Sequence) -> None:
        parent = self._parent
        self.limit = parent.limit
        if self._max_tokens is not None:
            self.limit = min(self._rules.max_model_len, len(seq.tokens) + self._max_tokens)
        same = parent.strings.strings == tuple(seq.params.stop)
        self.strings = parent.strings.fork() if same else StopStrings(seq.params.stop)
        self.chain = parent.chain.fork() if parent.chain is not None else None
        first = len(seq.tokens) - len(self._append)
        for at, token in enumerate(self._append, first):
            self._feed(seq, token, at)
        self.strings = self.strings.fork()  # positions count from where it generates
