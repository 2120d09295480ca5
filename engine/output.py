"""What a caller gets: pieces while it runs (`Delta`), the whole at its end (`Output`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.request import TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished continuation.

    `text` is the answer (all of the text for models without thinking markers), `thinking` what
    stood between the markers. `thinking_tokens` is the chain's length, `answer_tokens` the rest;
    markers count for neither. `stop_reason` is the stop string or id, or an error's message.
    `edits` counts the edits of text that made it what it is, by the controller's name.
    """

    index: int
    text: str
    thinking: str
    token_ids: tuple[int, ...]
    thinking_tokens: int
    answer_tokens: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    edits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One finished request; the short properties are its first choice's.

    `started` is when it left the queue, as time.perf_counter() tells it; None: never.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    started: float | None = field(default=None, compare=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def thinking(self) -> str:
        return self.choices[0].thinking

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What became final for one choice: text of the thinking and of the answer, token ids.

    `finish_reason` is set on a choice's last delta alone, `output` on a request's.
    """

    id: str
    index: int
    text: str = ""
    thinking: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    output: Output | None = None
