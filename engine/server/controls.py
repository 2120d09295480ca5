"""What a request may ask beyond sampling, each in one place: thinking, tools, formats, the cache.

`read` is called once for a request, by `openai.py`. A control becomes something that the engine
does, or a 400 that names it: none is ever ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from engine.model.template import variables_of
from engine.model.tokenizer import Tokenizer
from engine.request import Grammar
from engine.server.errors import FieldError
from engine.server.formats import read_format
from engine.server.schema import ChatRequest, CompletionRequest
from engine.server.thinking import (
    EFFORT,
    EFFORTS,
    FLAT,
    PLACES,
    Abilities,
    places,
    plan_thinking,
    read_thinking,
    template_variables,
)
from engine.server.tools import ToolUse, read_tools, why_no_tools

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
    "repetition_detection": "loops are the server's to find (taut serve --loop-guard)",
    "stop_effort": f"isn't supported; use {EFFORT} or thinking_token_budget",
    "use_beam_search": "isn't supported; use n",
    "audio": "only text is supported",
    "functions": "is the old spelling; use tools",
    "function_call": "is the old spelling; use tool_choice",
    "web_search_options": "isn't supported",
    **dict.fromkeys(_GRAMMARS, "isn't supported; use response_format"),
}
_OUTSIDE = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *_REFUSED} - {
    *FLAT,
    *PLACES,
}
"""Fields that mean nothing inside another one. openai-python merges its `extra_body` into the body;
other clients send it as it is."""


class Offer(NamedTuple):
    """What a request's wishes are held against: what the model can be told, tokens of thinking by
    effort, and why no tools can be called."""

    abilities: Abilities
    efforts: Mapping[str, int | None] = EFFORTS
    no_tools: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, markers: bool, efforts: Mapping[str, int | None]) -> Self:
        """A model's. ValueError: its template can't be read."""
        template = tokenizer.chat_template
        variables = frozenset[str]() if template is None else variables_of(template)
        special = [tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.special_ids]
        return cls(Abilities(markers, variables), efforts, why_no_tools(template, special))

    def without_template(self) -> Self:
        """For a prompt that is no conversation."""
        abilities = self.abilities._replace(variables=frozenset())
        return self._replace(abilities=abilities, no_tools="belong to a chat, not to a prompt")


class Controls(NamedTuple):
    """A request's controls, for the engine, the template and the reply.

    `budget` is SamplingParams.thinking_token_budget, `variables` are the chat template's, `show`
    tells whether the answer has the thinking's text, `form` is the field that `grammar` is from.
    """

    budget: int | None
    variables: Mapping[str, Any]
    show: bool
    tools: ToolUse | None
    grammar: Grammar | None
    form: str | None


def read(values: Mapping[str, Any], offer: Offer) -> Controls:
    """Of a body's fields. FieldError: something can't be done."""
    _check_refused(values)
    asked = read_thinking(values)
    budget, variables = plan_thinking(asked, offer.abilities, offer.efforts)
    tools = read_tools(values)
    if tools is not None and offer.no_tools is not None:
        raise FieldError("tools", offer.no_tools)
    grammar = read_format(values, tools)
    form = "tools" if tools is not None and tools.choice == "required" else "response_format"
    return Controls(
        budget=budget,
        variables={**template_variables(values, offer.abilities), **variables},
        show=asked.show is not False,
        tools=tools,
        grammar=grammar,
        form=form if grammar is not None else None,
    )


def _check_refused(values: Mapping[str, Any]) -> None:
    """Fields that would change the answer, and that nobody here does, or not where they stand."""
    for name, why in _REFUSED.items():
        if values.get(name) not in (None, False, [], {}):
            raise FieldError(name, why)
    for where, inner in places(values):
        if where and not where.endswith("chat_template_kwargs."):  # whose names are all checked
            for name in sorted(inner.keys() & _OUTSIDE):
                if inner[name] is not None:
                    raise FieldError(f"{where}{name}", "is read only in the body itself")
    if values.get("separate_reasoning") is False:
        raise FieldError("separate_reasoning", "thinking comes in reasoning_content only")
    if values.get("modalities") not in (None, ["text"]):
        raise FieldError("modalities", "only text is supported")


_THINKING: Mapping[str, str] = {
    "thinking_token_budget": "integer >= 0: thinking is closed after exactly so many tokens",
    EFFORT: "a level, or none: its budget, see reasoning_efforts",
    "enable_thinking": "boolean: whether the model thinks; also thinking, think, reasoning.enabled",
    "include_reasoning": "boolean: false keeps the thinking out of the answer",
    "stop_in_thinking": "boolean: stop strings end the thinking too",
}
_OTHERS: Mapping[str, str] = {
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


def extras(offer: Offer, kv_budget: int | None, *, allow_full: bool) -> dict[str, str]:
    """What goes into `extra_body`, for the model's card; `kv_budget` is the server's own."""
    made = {**_THINKING, **_OTHERS}
    if not offer.abilities.markers:
        made = {k: v for k, v in made.items() if k not in (EFFORT, "enable_thinking")}
    if kv_budget is not None:
        full = ', or "full"' if allow_full else ""
        made["kv_budget"] = f"integer up to {kv_budget}: cells that a kv head keeps{full}"
    return made
