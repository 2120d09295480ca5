"""The shapes of answers, as OpenAI documents them and with vLLM's additions.

A key that isn't required is left out when there is nothing to say.
"""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(TypedDict):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt; none for the first."""


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """`completion_tokens` has the thinking in it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class FunctionCall(TypedDict):
    """`arguments` is JSON text, unless the answer was cut."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has all keys; later ones have the next piece of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class Ending(TypedDict):
    """`stop_reason` is the stop string or id that ended a choice, or "repetition"."""

    index: int
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatChoice(Ending):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Ending):
    text: str
    logprobs: CompletionLogprobs | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class Head(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[list[int]]]
    prompt_logprobs: NotRequired[list[PromptLogprobs]]


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]
    reasoning_content: str
    reasoning: str


class ChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    token_ids: NotRequired[list[int]]


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


class ModelCard(TypedDict):
    """`taut` says how the server runs the model, and what `extra_body` may hold."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    taut: dict[str, object]


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[list[str]]


class Text(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    error: ErrorDetail


class Health(TypedDict):
    status: Literal["ok"]
