"""Controllers that tests script: best of N over two roles, rewinding, listening."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.request import Origin, Sequence
from engine.scheduler.controller import (
    Adopt,
    Branch,
    Controller,
    Decision,
    Edit,
    ThoughtEvent,
    TokenEvent,
    Watch,
)
from tests.scheduler.fakes import ids, noise


@dataclass(frozen=True)
class BestOfN(Controller):
    """Every `every`-th thought: candidates on two roles, each scored by a third call, best adopted.

    The shape of what comes: a round of generated children, a round of scored ones that read the
    candidates' text, then an adoption from the round before.
    """

    every: int = 2
    each: int = 2
    max_tokens: int = 6
    roles: tuple[str, ...] = ("main", "helper")
    children: dict[str, int] = field(default_factory=lambda: {"main": 2, "helper": 2})

    def watch(self) -> Watch:
        return _BestOfNWatch(self)


class _BestOfNWatch(Watch):
    def __init__(self, controller: BestOfN) -> None:
        self.controller = controller
        self.thoughts = 0
        self.candidates: list[Sequence] = []

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        self.thoughts += 1
        if self.thoughts % self.controller.every:
            return None
        return [
            Branch(
                role=role,
                until="thought",
                append=tuple(ids("a" * k)),
                max_tokens=self.controller.max_tokens,
            )
            for role in ("main", "helper")
            for k in range(self.controller.each)
        ]

    def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        if children[0].score is None:
            self.candidates = list(children)
            begin = len(seq.tokens)
            return [
                Branch(role="main", append=tuple(child.tokens[begin:]), until="scored")
                for child in children
            ]
        means = []
        for child, candidate in zip(children, self.candidates, strict=True):
            assert child.score is not None
            assert len(child.score) == len(candidate.tokens) - len(seq.tokens)
            means.append(sum(child.score) / len(child.score) if child.score else -9.0)
        return Adopt(self.candidates[means.index(max(means))])


@dataclass(frozen=True)
class Rewinder(Controller):
    """Takes back every third thought once, and says something instead."""

    def watch(self) -> Watch:
        return _RewinderWatch()


class _RewinderWatch(Watch):
    def __init__(self) -> None:
        self.heard = 0
        self.done: list[int] = []
        self.starts: list[int] = []

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        self.heard += 1
        if self.heard % 3 or event.start in self.done:
            self.starts = [event.end]
            return None
        self.done.append(event.start)
        return Edit(truncate=event.start, append=tuple(ids("bb"[: noise(self.heard) % 3])))

    def settled(self, seq: Sequence) -> int:
        return self.starts[-1] if self.starts else seq.prompt_len


@dataclass(frozen=True)
class Listener(Controller):
    """Hears all, decides by `answer`; `heard` is shared by all its watches."""

    heard: list[tuple[str, int, Origin]] = field(default_factory=list)
    answer: Callable[[Sequence, TokenEvent], Decision] | None = None
    roles: tuple[str, ...] = ("main",)
    children: dict[str, int] = field(default_factory=dict)
    entropy: bool = False
    watch_ids: tuple[int, ...] = ()
    on_join: Callable[[Sequence, Seq[Sequence]], Decision] | None = None
    on_begin: Callable[[Sequence], Decision] | None = None
    thoughts: list[ThoughtEvent] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    rewound: list[int] = field(default_factory=list)

    def watch(self) -> Watch:
        return _ListenerWatch(self)


class _ListenerWatch(Watch):
    def __init__(self, controller: Listener) -> None:
        self.controller = controller

    def begin(self, seq: Sequence) -> Decision:
        return self.controller.on_begin(seq) if self.controller.on_begin else None

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        assert seq.tokens[event.position] == event.token
        assert len(seq.tokens) == event.position + 1
        self.controller.heard.append((seq.id, event.token, event.origin))
        self.controller.events.append(event)
        return self.controller.answer(seq, event) if self.controller.answer else None

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        self.controller.thoughts.append(event)
        return None

    def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        return self.controller.on_join(seq, children) if self.controller.on_join else None

    def rewound(self, seq: Sequence, pos: int) -> None:
        self.controller.rewound.append(pos)
