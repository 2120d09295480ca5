"""From the engine's outputs and deltas to answers and chunks. Pure: no socket, no engine.

A reply keeps what a stream has said so far; one is made for each request. Chunks follow OpenAI's
order: the role, text, one finish for each choice, then the usage if it was asked for. Thinking and
answer never share a chunk, and a chunk that would say nothing isn't made: its logprobs and token
ids wait for the next one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from engine.model.tokenizer import Tokenizer
from engine.output import Choice, Delta, FinishReason, Output
from engine.request import TokenLogprob
from engine.server import shapes
from engine.server.errors import UNAVAILABLE, ApiError
from engine.server.logprobs import prompt_logprobs
from engine.server.openai import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What all answers of a model say of it. `marked`: thinking is told by markers, so there is
    such a thing as a reasoning token."""

    tokenizer: Tokenizer
    fingerprint: str
    marked: bool


@dataclass(slots=True)
class Pending:
    """Of one choice: what was generated and has not been in a chunk."""

    begun: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Part(NamedTuple):
    """A piece of a choice: text of one kind, or its end."""

    choice: int
    text: str = ""
    thinking: str = ""
    call: Mapping[str, Any] | None = None
    finish_reason: shapes.FinishReason | None = None
    stop_reason: str | int | None = None


Whole = TypeVar("Whole")
Chunk = TypeVar("Chunk", bound=Mapping[str, Any])


class Reply(ABC, Generic[Whole, Chunk]):
    """One request's answer, whole or in chunks."""

    chunk_object: str

    def __init__(self, asked: Asked, served: Served, id: str, model: str) -> None:
        self.asked = asked
        self.served = served
        self.id = id
        self.model = model
        self.created = int(time.time())
        self._pending: defaultdict[int, Pending] = defaultdict(Pending)

    def whole(self, outputs: Seq[Output]) -> Whole:
        """Of every prompt's output, in order. ApiError: one of them failed."""
        return self._answer(self._wanted(outputs))

    def chunks(self, prompt: int, delta: Delta) -> Iterator[Chunk]:
        """What a delta of the prompt of that number gives. ApiError: it failed."""
        if self.asked.scores_only:
            delta = _unsaid(delta)
        index = prompt * self.asked.params.n + delta.index
        pending = self._pending[index]
        pending.logprobs += delta.logprobs
        pending.token_ids += delta.token_ids
        finish = delta.finish_reason and _ending(delta.finish_reason, delta.stop_reason)
        if not pending.begun:
            pending.begun = True
            yield from self._begin(prompt, index)
        if delta.thinking and self.asked.show_thinking:
            yield self._chunk(Part(index, thinking=delta.thinking))
        if delta.text:
            yield from self._say(index, delta.text)
        if finish:
            yield from self._end(index, finish, self._told(delta.stop_reason))

    def usage_chunk(self, outputs: Seq[Output]) -> dict[str, Any]:
        """The last chunk, for those who asked."""
        usage = self.usage_of(self._wanted(outputs))
        return {**self.head(self.chunk_object), "choices": [], "usage": usage}

    @abstractmethod
    def _answer(self, outputs: Seq[Output]) -> Whole: ...

    @abstractmethod
    def _begin(self, prompt: int, index: int) -> Iterator[Chunk]:
        """Before a choice's first token."""

    def _say(self, index: int, text: str) -> Iterator[Chunk]:
        """Text of a choice's answer."""
        yield self._chunk(Part(index, text=text))

    def _end(
        self, index: int, reason: shapes.FinishReason, detail: str | int | None
    ) -> Iterator[Chunk]:
        """Behind all of a choice's text."""
        yield self._chunk(Part(index, finish_reason=reason, stop_reason=detail))

    @abstractmethod
    def _chunk(self, part: Part) -> Chunk: ...

    def _told(self, stop_reason: str | int | None) -> str | int | None:
        """Nothing of stop strings that the client doesn't know."""
        return None if stop_reason in self.asked.own_stop else stop_reason

    def _wanted(self, outputs: Seq[Output]) -> list[Output]:
        if not self.asked.scores_only:
            return list(outputs)
        return [replace(o, choices=tuple(map(_unsaid, o.choices))) for o in outputs]

    # what both kinds of answer are made of

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.served.fingerprint,
        }

    def chunk_of(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        made = {**self.head(self.chunk_object), "choices": [choice]}
        return {**made, "usage": None} if self.asked.usage else made

    def take(self, index: int) -> tuple[list[TokenLogprob], dict[str, Any]]:
        """The choice's logprobs that wait, and its token ids as a key, if they were asked for."""
        pending = self._pending[index]
        taken, ids = pending.logprobs, pending.token_ids
        pending.logprobs, pending.token_ids = [], []
        return taken, {"token_ids": ids} if self.asked.token_ids else {}

    def thinking(self, text: str) -> dict[str, Any]:
        """Under both names that clients read; no key if there is none."""
        if not text or not self.asked.show_thinking:
            return {}
        return {"reasoning_content": text, "reasoning": text}

    def end_of(self, choice: Choice) -> dict[str, Any]:
        made: dict[str, Any] = {
            "finish_reason": _ending(choice.finish_reason, choice.stop_reason),
            "stop_reason": self._told(choice.stop_reason),
        }
        return {**made, "token_ids": list(choice.token_ids)} if self.asked.token_ids else made

    def prompt_logprobs(self, output: Output) -> shapes.PromptLogprobs:
        return prompt_logprobs(self.served.tokenizer, output.prompt_logprobs or ())

    def usage_of(self, outputs: Seq[Output]) -> shapes.Usage:
        """Of all prompts and choices, counted in tokens of the engine."""
        choices = [choice for output in outputs for choice in output.choices]
        prompt = sum(len(output.prompt_token_ids) for output in outputs)
        completion = sum(len(choice.token_ids) for choice in choices)
        thinking = sum(choice.thinking_tokens for choice in choices) if self.served.marked else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(o.cached_tokens for o in outputs)},
            "completion_tokens_details": {"reasoning_tokens": thinking},
        }


Said = TypeVar("Said", Choice, Delta)


def _unsaid(said: Said) -> Said:
    """Without the one token that was generated because one has to be."""
    cut = replace(said, text="", thinking="", token_ids=(), logprobs=())
    if isinstance(cut, Choice):
        cut = replace(cut, thinking_tokens=0, answer_tokens=0)
    if cut.finish_reason != "stop":
        return cut
    return replace(cut, finish_reason="length", stop_reason=None)


def _ending(reason: FinishReason, detail: object) -> shapes.FinishReason:
    """ApiError: it's no end that a client can use."""
    if reason == "error":
        raise ApiError(500, f"the request failed: {detail}")
    if reason == "abort":
        raise ApiError(503, UNAVAILABLE["draining"], retry_after=1)
    return reason
