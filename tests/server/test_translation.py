"""Bodies to prompts and settings, with no socket and no engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.prompt import Chat
from engine.request import SamplingParams
from engine.server import openai
from engine.server.controls import Offer
from engine.server.errors import ApiError, refused
from engine.server.openai import Asked
from engine.server.schema import ChatRequest, CompletionRequest
from tests.server.live import USER

NO_BUDGET = Offer()


def chat(offer: Offer = NO_BUDGET, **fields: Any) -> Asked:
    data = json.dumps({"messages": USER, **fields}).encode()
    return openai.ask_chat(openai.parse(ChatRequest, data), offer)


def completion(**fields: Any) -> Asked:
    data = json.dumps({"prompt": "Hi", **fields}).encode()
    return openai.ask_completion(openai.parse(CompletionRequest, data), NO_BUDGET)


def test_defaults() -> None:
    assert chat().params == SamplingParams(max_tokens=None)
    assert chat().prompts == (Chat(messages=USER),)
    assert completion().params == SamplingParams(max_tokens=16)
    assert completion().prompts == ("Hi",)


def test_every_setting() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "max_tokens": 30,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "allowed_token_ids": [1, 2],
        "seed": 7,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "stop_in_thinking": True,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "thinking_token_budget": 9,
    }
    bias = {"5": 1.5, "6": -100}
    expected = SamplingParams(**fields, logit_bias={5: 1.5, 6: -100})
    assert chat(**fields, logit_bias=bias).params == expected
    assert completion(**fields, logit_bias=bias).params == expected
    assert chat(stop="a").params.stop == ("a",)


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
    ],
)
def test_logprobs_of_a_chat(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).params.logprobs == logprobs


def test_echo_asks_for_the_prompt_s_logprobs() -> None:
    assert completion(echo=True, logprobs=2).params.prompt_logprobs == 2
    assert completion(echo=True).params.prompt_logprobs is None
    assert completion(echo=True, max_tokens=0).scores_only


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_a_thinking_history_is_what_templates_read() -> None:
    history = [{"role": "assistant", "content": "4", "reasoning": "2+2"}, *USER]
    (prompt,) = chat(messages=history).prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0]["reasoning_content"] == "2+2"
    both = [{"role": "assistant", "reasoning_content": "a", "reasoning": "a"}, *USER]
    (prompt,) = chat(messages=both).prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0] == {"role": "assistant", "content": None, "reasoning_content": "a"}


def test_template_variables() -> None:
    (prompt,) = chat(chat_template_kwargs={"enable_thinking": False}).prompts
    assert isinstance(prompt, Chat)
    assert prompt.variables == {"enable_thinking": False}


def test_the_server_s_own_budget_may_be_named() -> None:
    assert chat(Offer(kv_budget=64), kv_budget=64).params == chat().params
    with pytest.raises(ApiError, match="budget of 32"):
        chat(Offer(kv_budget=32), kv_budget=64)


@pytest.mark.parametrize("name", ["tools", "tool_choice", "response_format", "guided_json"])
def test_what_nobody_does_yet_is_refused_by_name(name: str) -> None:
    values: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "guided_json": {},
    }
    with pytest.raises(ApiError, match=name) as caught:
        chat(**{name: values[name]})
    assert caught.value.status == 400
    assert caught.value.param == name
    assert chat(tools=[], tool_choice="none", response_format={"type": "text"})


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("top_k must be at least 1", "top_k"),
        ("logit_bias of token 5 must be", "logit_bias"),
        ("the prompt is empty", "prompt"),
        ("messages[3].role must be", "messages"),
        ("something else", None),
    ],
)
def test_the_field_of_a_refusal(message: str, param: str | None) -> None:
    fields = ("top_k", "logit_bias", "messages")
    assert refused(ValueError(message), fields, "prompt").param == param
