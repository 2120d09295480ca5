"""From a request's body to what the engine is asked. Pure: no socket, no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from engine.prompt import Chat, Prompt
from engine.request import SamplingParams
from engine.server import controls
from engine.server.controls import Controls, Offer
from engine.server.errors import ApiError, invalid, refused, unsupported
from engine.server.schema import (
    MAX_STOPS,
    Body,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    ThinkingFields,
    TokenizeRequest,
)

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of a completion; a chat's is the rest of the context."""

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the engine takes it: prompts that share their settings.

    `limit` is the body's name for `params.max_tokens`, `field` the one that holds the prompts.
    `scores_only`: the one token that has to be generated is not wanted.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    stream: bool
    usage: bool
    field: str
    limit: str
    priority: int = 0
    request_id: str | None = None
    show_thinking: bool = True
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    scores_only: bool = False


def parse(kind: type[B], data: bytes) -> B:
    """A body of this kind. ApiError 400 names the first field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise invalid(error) from error


def ask_chat(body: ChatRequest, offer: Offer) -> Asked:
    """ApiError 400: it can't be asked."""
    wanted = controls.read(body, offer)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, limit)
    if max_tokens == 0:
        raise ApiError(400, "max_tokens: a chat needs at least 1", param="max_tokens")
    prompt = chat_of(body.messages, body, tools=wanted.tools, variables=wanted.thinking.variables)
    params = _params(body, max_tokens, _chat_logprobs(body), wanted.thinking.budget)
    return _asked(body, wanted, (prompt,), params, field="messages", limit=limit)


def ask_completion(body: CompletionRequest, offer: Offer) -> Asked:
    """ApiError 400: it can't be asked."""
    wanted = controls.read(body, offer)
    if body.suffix:
        raise unsupported("suffix", "text can't be inserted; leave it out")
    if body.best_of not in (None, body.n or 1):
        raise unsupported("best_of", "must be n, or be left out")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 goes with echo only", param="max_tokens")
    budget = wanted.thinking.budget
    params = _params(body, max(max_tokens, 1), body.logprobs, budget, echo=bool(body.echo))
    return _asked(
        body,
        wanted,
        _prompts(body.prompt),
        params,
        field="prompt",
        limit="max_tokens",
        echo=bool(body.echo),
        scores_only=max_tokens == 0,
    )


def _asked(
    body: SamplingFields,
    wanted: Controls,
    prompts: tuple[Prompt, ...],
    params: SamplingParams,
    **rest: Any,
) -> Asked:
    options = body.stream_options
    if options is not None and not body.stream:
        raise ApiError(400, "stream_options: goes with stream=true only", param="stream_options")
    if body.stream and params.prompt_logprobs is not None:
        raise unsupported(
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
            "those of the prompt come with a whole answer only; leave stream out",
        )
    return Asked(
        prompts=prompts,
        params=params,
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        priority=body.priority or 0,
        request_id=body.request_id,
        prompt_logprobs=body.prompt_logprobs is not None,
        show_thinking=wanted.thinking.show,
        token_ids=bool(body.return_token_ids),
        **rest,
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return (cast(Prompt, prompt),)
    if not prompt or not all(prompt):
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    return tuple(cast("list[Prompt]", prompt))


def chat_of(
    messages: list[Message],
    body: ChatRequest | TokenizeRequest,
    *,
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> Chat:
    """The conversation as the template reads it."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message: add_generation_prompt=true would end that message",
            param="continue_final_message",
        )
    return Chat(
        messages=[_message(message) for message in messages],
        tools=tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=variables,
    )


def text_or_chat(body: TokenizeRequest) -> Prompt:
    """What is to be tokenised. ApiError 400: neither, or both."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: give either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt
    variables = controls.read_thinking(ThinkingFields(), body.chat_template_kwargs or {}).variables
    return chat_of(body.messages or [], body, tools=None, variables=variables)


def _message(message: Message) -> dict[str, Any]:
    """Templates know "system", not "developer", and thinking as `reasoning_content`."""
    values = message.model_dump(exclude_none=True)
    if values["role"] == "developer":
        values["role"] = "system"
    thought = values.pop("reasoning", None)
    if thought is not None:
        values.setdefault("reasoning_content", thought)
    return {"content": None, **values} if values["role"] == "assistant" else values


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs=true", param="top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise ApiError(
            400,
            f"top_logprobs: must be from 0 to 20, not {body.top_logprobs}",
            param="top_logprobs",
        )
    return (body.top_logprobs or 0) if body.logprobs else None


_SAME = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "seed",
    "stop",
    "stop_token_ids",
    "stop_in_thinking",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields that SamplingParams has by the same name."""


def _params(
    body: SamplingFields,
    max_tokens: int | None,
    logprobs: int | None,
    budget: int | None,
    *,
    echo: bool = False,
) -> SamplingParams:
    named = {name: getattr(body, name) for name in _SAME}
    values: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if isinstance(values.get("stop"), list) and len(values["stop"]) > MAX_STOPS:
        raise ApiError(400, f"stop: at most {MAX_STOPS} strings", param="stop")
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if echo and logprobs is not None:
        values.setdefault("prompt_logprobs", logprobs)
    try:
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, thinking_token_budget=budget, **values
        )
    except ValueError as error:
        raise refused(error, type(body).model_fields, "prompt") from error


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise ApiError(
            400, f"logit_bias: {json.dumps(key[:40])} is no token id", param="logit_bias"
        ) from None
