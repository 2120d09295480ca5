"""What a request may ask beyond sampling, each in one place: thinking, tools, formats, the cache.

`read` is called once for a request, by `openai.py`. A control becomes something that the engine
does, or a 400 that names it: none is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.server.errors import unsupported
from engine.server.schema import Body, ChatRequest, SamplingFields, ThinkingFields, given

_BUDGETS = (
    "thinking_budget_tokens",
    "reasoning_budget_tokens",
    "reasoning_budget",
    "thinking_budget",
    "max_thinking_tokens",
    "reasoning",
    "thinking",
    "custom_params",
)
_EFFORTS = ("reasoning_effort", "stop_effort")
_GRAMMARS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "json_schema",
    "grammar",
    "regex",
    "ebnf",
)
_REFUSED: Mapping[str, str] = {
    "chat_template": "templates of requests aren't run; the model's own is used",
    "documents": "isn't supported; put documents into a message",
    "cache_salt": "prefixes are shared between all clients of this server; leave it out",
    "kv_policy": "is the server's own (taut serve --kv-policy)",
    "kv_window": "is the server's own (taut serve --kv-window)",
    "bad_words": "isn't supported; ban tokens by logit_bias of -100",
    "logits_processors": "code of requests isn't run",
    "repetition_detection": "isn't supported",
    "use_beam_search": "isn't supported; use n",
    "audio": "only text is supported",
    "functions": "is the old spelling; use tools",
    "function_call": "is the old spelling; use tool_choice",
    "web_search_options": "isn't supported",
}


class Offer(NamedTuple):
    """What a request's wishes are held against: how the server runs its model."""

    kv_budget: int | None = None


class Thinking(NamedTuple):
    """`budget` is SamplingParams.thinking_token_budget, `variables` are the chat template's, and
    `show` tells whether the answer has the thinking's text."""

    budget: int | None
    variables: Mapping[str, Any]
    show: bool


class Controls(NamedTuple):
    """A request's controls, for the engine, the template and the reply."""

    thinking: Thinking
    tools: list[dict[str, Any]] | None = None


def read(body: SamplingFields, offer: Offer) -> Controls:
    """ApiError 400: something can't be done."""
    _check_refused(body)
    _check_format(body)
    _check_cache(body, offer)
    if isinstance(body, ChatRequest):
        return Controls(read_thinking(body, body.chat_template_kwargs or {}), _tools(body))
    return Controls(read_thinking(body, {}))


def read_thinking(body: ThinkingFields, variables: Mapping[str, Any]) -> Thinking:
    """Budgets and efforts under every spelling; `variables` are the request's own."""
    values = given(body)
    for name in (*_BUDGETS, *_EFFORTS):
        if name in values:
            raise unsupported(name, "use thinking_token_budget, a count of tokens")
        if name in variables:
            raise unsupported(
                f"chat_template_kwargs.{name}", "use thinking_token_budget, a count of tokens"
            )
    if "thinking_token_budget" in variables:
        raise unsupported(
            "chat_template_kwargs.thinking_token_budget", "put it beside messages, not in there"
        )
    return Thinking(body.thinking_token_budget, variables, body.include_reasoning is not False)


def _tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """What the template is given of tools."""
    if body.tools:
        raise unsupported("tools", "this server doesn't parse tool calls; leave tools out")
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "needs tools")
    return None


def _check_format(body: SamplingFields) -> None:
    """Formats that constrain the answer."""
    values = given(body)
    asked = values.get("response_format", {})
    if asked.get("type", "text") != "text":
        raise unsupported(
            "response_format", f"type {asked['type']!r:.40} isn't supported; only text is"
        )
    for name in _GRAMMARS:
        if name in values:
            raise unsupported(name, "answers can't be constrained")


def _check_cache(body: SamplingFields, offer: Offer) -> None:
    """Settings of the cache."""
    if body.kv_budget not in (None, offer.kv_budget):
        own = "a full cache" if offer.kv_budget is None else f"a budget of {offer.kv_budget}"
        raise unsupported(
            "kv_budget", f"this server runs every request with {own} (taut serve --kv-budget)"
        )


def _check_refused(body: Body) -> None:
    """Fields that would change the answer, and that nobody here does."""
    values = given(body)
    for name, why in _REFUSED.items():
        if values.get(name) not in (None, False, [], {}):
            raise unsupported(name, why)
    if values.get("separate_reasoning") is False:
        raise unsupported("separate_reasoning", "thinking comes in reasoning_content only")
    if values.get("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", "only text is supported")


EXTRAS: Mapping[str, str] = {
    "thinking_token_budget": "integer >= 0: thinking is closed after exactly so many tokens",
    "stop_in_thinking": "boolean: stop strings end the thinking too",
    "include_reasoning": "boolean: false keeps the thinking out of the answer",
    "top_k": "integer, 0 or -1: off",
    "min_p": "number from 0 to 1",
    "repetition_penalty": "number above 0",
    "min_tokens": "integer",
    "ignore_eos": "boolean",
    "stop_token_ids": "list of token ids",
    "allowed_token_ids": "list of token ids",
    "include_stop_str_in_output": "boolean",
    "skip_special_tokens": "boolean",
    "prompt_logprobs": "integer from 0 to 20",
    "return_token_ids": "boolean",
    "priority": "integer: lower runs first",
    "request_id": "string: unique while the request is live",
    "continue_final_message": "boolean: the last message is the answer's beginning",
    "chat_template_kwargs": "object: variables of the model's chat template",
}
"""What goes into `extra_body`, for the model's card."""
