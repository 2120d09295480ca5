"""From a request's body to what the engine is asked. Pure: no socket, no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from engine.prompt import Chat, Prompt
from engine.request import SamplingParams
from engine.server import controls
from engine.server.controls import Controls, Offer
from engine.server.errors import FieldError, invalid, refused
from engine.server.schema import (
    MAX_STOPS,
    Body,
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TokenizeRequest,
    given,
)
from engine.server.tools import template_messages

COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of a completion; a chat's is the rest of the context."""

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as the engine takes it: prompts that share their settings.

    `limit` is the body's name for `params.max_tokens`, `field` the one that holds the prompts,
    `form` the one that `params.grammar` is from. `tools`: calls are looked for in the answer, and
    `own_stop` are stop strings of that, which the client didn't give. `scores_only`: the one token
    that has to be generated is not wanted.
    """

    prompts: tuple[Prompt, ...]
    params: SamplingParams
    stream: bool
    usage: bool
    field: str
    limit: str
    form: str | None = None
    tools: bool = False
    own_stop: tuple[str, ...] = ()
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
    wanted = controls.read(given(body), offer)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(body, limit)
    if max_tokens == 0:
        raise FieldError("max_tokens", "a chat needs at least 1")
    prompt = chat_of(body.messages, body, wanted)
    params = _params(body, wanted, max_tokens, _chat_logprobs(body))
    return _asked(body, wanted, (prompt,), params, field="messages", limit=limit)


def ask_completion(body: CompletionRequest, offer: Offer) -> Asked:
    """ApiError 400: it can't be asked."""
    wanted = controls.read(given(body), offer.without_template())
    if body.suffix:
        raise FieldError("suffix", "text can't be inserted; leave it out")
    if body.best_of not in (None, body.n or 1):
        raise FieldError("best_of", "must be n, or be left out")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise FieldError("max_tokens", "0 goes with echo only")
    params = _params(body, wanted, max(max_tokens, 1), body.logprobs, echo=bool(body.echo))
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
        raise FieldError("stream_options", "goes with stream=true only")
    if options is not None and (options.model_extra or {}).get("continuous_usage_stats"):
        raise FieldError(
            "stream_options.continuous_usage_stats",
            "isn't supported; include_usage gives the usage once, in the last chunk",
        )
    if body.stream and params.prompt_logprobs is not None:
        raise FieldError(
            "logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
            "those of the prompt come with a whole answer only; leave stream out",
        )
    return Asked(
        prompts=prompts,
        params=params,
        stream=bool(body.stream),
        usage=bool(options and options.include_usage),
        form=wanted.form,
        tools=wanted.tools is not None,
        own_stop=tuple(each for each in _tool_stop(wanted) if each not in _stop(body)),
        priority=body.priority or 0,
        request_id=body.request_id,
        prompt_logprobs=body.prompt_logprobs is not None,
        show_thinking=wanted.show,
        token_ids=bool(body.return_token_ids),
        **rest,
    )


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[Prompt, ...]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return (cast(Prompt, prompt),)
    if not prompt or not all(prompt):
        raise FieldError("prompt", "must not be empty")
    return tuple(cast("list[Prompt]", prompt))


def chat_of(messages: list[Message], body: ChatRequest | TokenizeRequest, wanted: Controls) -> Chat:
    """The conversation as the template reads it."""
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise FieldError(
            "continue_final_message", "add_generation_prompt=true would end that message"
        )
    return Chat(
        messages=template_messages([_message(message) for message in messages]),
        tools=None if wanted.tools is None else wanted.tools.tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=wanted.variables,
    )


def text_or_chat(body: TokenizeRequest, offer: Offer) -> Prompt:
    """What is to be tokenised. FieldError: neither or both, or what no model can be shown."""
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "give either prompt or messages")
    if body.messages is not None:
        return chat_of(body.messages, body, controls.read(given(body), offer))
    controls.read(given(body), offer.without_template())
    return cast(str, body.prompt)


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
        raise FieldError("top_logprobs", "needs logprobs=true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= 20:
        raise FieldError("top_logprobs", f"must be from 0 to 20, not {body.top_logprobs}")
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
    "stop_token_ids",
    "stop_in_thinking",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "prompt_logprobs",
    "kv_budget",
)
"""Fields that SamplingParams has by the same name."""


def _params(
    body: SamplingFields,
    wanted: Controls,
    max_tokens: int | None,
    logprobs: int | None,
    *,
    echo: bool = False,
) -> SamplingParams:
    named = {name: getattr(body, name) for name in _SAME}
    values: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if len(stop := _stop(body)) > MAX_STOPS:
        raise FieldError("stop", f"at most {MAX_STOPS} strings")
    if body.logit_bias is not None:
        values["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    if echo and logprobs is not None:
        values.setdefault("prompt_logprobs", logprobs)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=(*stop, *_tool_stop(wanted)),
            thinking_token_budget=wanted.budget,
            grammar=wanted.grammar,
            **values,
        )
    except ValueError as error:
        raise refused(error, type(body).model_fields, "prompt") from error


def _stop(body: SamplingFields) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _tool_stop(wanted: Controls) -> tuple[str, ...]:
    return () if wanted.tools is None else wanted.tools.stop


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise FieldError("logit_bias", f"{json.dumps(key[:40])} is no token id") from None
