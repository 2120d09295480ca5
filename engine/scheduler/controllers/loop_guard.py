"""Loop guard: a chain that repeats itself word for word is closed, and the model still answers.

What counts as a loop is exact (see detect.py): the same run of tokens three times or more at the
chain's end, 48 tokens at least. A model in such a cycle seldom leaves it: it would think up to its
last token and answer nothing. So the closing phrase is forced, as a thinking budget does it, and
what was thought so far stays. A block that is opened later is guarded alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.request import Finish, Sequence
from engine.scheduler.controller import Controller, Edit, Language, TokenEvent, Watch
from engine.scheduler.detect import LoopDetector, LoopSpec
from engine.scheduler.reasoning import ChainTracker, track_chain


@dataclass(frozen=True, kw_only=True)
class LoopGuard(Controller):
    """Closes the thinking when it loops.

    `aloud`: also for a model without thinking markers, whose chain is closed by its phrase, unless
    it follows a grammar; else its text is all answer. `answers`: a loop in the answer ends the
    output ("stop", with the detail "repetition"). `language` is filled in by `bind`.
    """

    spec: LoopSpec = field(default_factory=LoopSpec)
    aloud: bool = False
    answers: bool = False
    language: Language | None = None

    def bind(self, language: Language) -> LoopGuard:
        if not language.markers.closing:
            raise ValueError("LoopGuard needs markers.closing: how the thinking is closed")
        return replace(self, language=language)

    def watch(self) -> GuardWatch:
        if self.language is None:
            raise ValueError("LoopGuard isn't bound to a model: bind(language) comes first")
        return GuardWatch(self, self.language)


class GuardWatch(Watch):
    """Follows one sequence's generated tokens."""

    _chain: ChainTracker

    def __init__(self, guard: LoopGuard, language: Language) -> None:
        self._guard = guard
        self._language = language
        self._detector = LoopDetector(guard.spec)

    def begin(self, seq: Sequence) -> None:
        self._begin = len(seq.tokens)
        # a grammar has no place for a phrase in the answer
        aloud = self._guard.aloud and seq.matcher is None
        self._closes = bool(self._language.markers.end) or aloud
        self._chain = track_chain(self._language.markers, seq.tokens, self._language.token_bytes)

    def on_token(self, seq: Sequence, event: TokenEvent) -> Edit | None:
        """Forced text is never cut short: it may be another watch's closing phrase."""
        self._chain.feed(event.token)
        loop = self._detector.feed(event.token)
        if loop is None or event.origin == "forced":
            return None
        if self._closes and self._chain.thinking:
            return Edit(append=self._language.markers.closing)
        return Edit(finish=Finish("stop", "repetition")) if self._guard.answers else None

    def rewound(self, seq: Sequence, pos: int) -> None:
        self._chain.rewind(pos)
        self._detector.rewind(pos - self._begin)
