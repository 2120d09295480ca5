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
from engine.server.thinking import Abilities
from tests.server.live import USER

OFFER = Offer(Abilities(True, frozenset(("messages", "tools", "enable_thinking"))))


def chat(offer: Offer = OFFER, **fields: Any) -> Asked:
    data = json.dumps({"messages": USER, **fields}).encode()
    return openai.ask_chat(openai.parse(ChatRequest, data), offer)


def completion(**fields: Any) -> Asked:
    data = json.dumps({"prompt": "Hi", **fields}).encode()
    return openai.ask_completion(openai.parse(CompletionRequest, data), OFFER)


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
        "stop": ("a", "b"),
        "stop_token_ids": [3],
        "stop_in_thinking": True,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "thinking_token_budget": 9,
        "kv_budget": 64,
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


def test_budgets_of_the_cache() -> None:
    assert chat(kv_budget="full").params.kv_budget == "full"
    with pytest.raises(ApiError, match="kv_budget"):
        chat(kv_budget=0)


TOOL = {"type": "function", "function": {"name": "f"}}


def test_tools_reach_template_and_reply() -> None:
    asked = chat(tools=[TOOL])
    (prompt,) = asked.prompts
    assert isinstance(prompt, Chat)
    assert prompt.tools == (TOOL,)
    assert asked.tools
    assert (asked.form, asked.params.grammar, asked.own_stop) == (None, None, ())
    silent = chat(tools=[TOOL], tool_choice="none")
    (prompt,) = silent.prompts
    assert isinstance(prompt, Chat)
    assert (prompt.tools, silent.tools) == (None, False)
    assert chat(tools=[TOOL], tool_choice="required").form == "tools"
    asked = chat(response_format={"type": "json_object"})
    assert asked.form == "response_format"
    assert asked.params.grammar is not None


def test_the_stop_of_a_single_call_is_not_the_client_s() -> None:
    one = chat(tools=[TOOL], parallel_tool_calls=False, stop="x")
    assert one.params.stop == ("x", "</tool_call>")
    assert one.own_stop == ("</tool_call>",)
    assert chat(tools=[TOOL], parallel_tool_calls=False, stop="</tool_call>").own_stop == ()


def test_past_calls_are_objects_to_the_template() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    (prompt,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}, *USER]).prompts
    assert isinstance(prompt, Chat)
    assert prompt.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 6}}, "reasoning.max_tokens"),
        ({"chat_template_kwargs": {"style": 1}}, "chat_template_kwargs.style"),
        ({"tools": [{}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


def test_a_plain_prompt_has_no_template() -> None:
    assert completion(reasoning={"max_tokens": 5}).params.thinking_token_budget == 5
    assert completion(enable_thinking=False).params.thinking_token_budget == 0
    assert completion(response_format={"type": "json_object"}).params.grammar is not None
    for fields in ({"tools": [TOOL]}, {"chat_template_kwargs": {"a": 1}}):
        with pytest.raises(ApiError):
            completion(**fields)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("top_k must be at least 1", "top_k"),
        ("logit_bias of token 5 must be", "logit_bias"),
        ("the prompt is empty", "prompt"),
        ("messages[3].role must be", "messages"),
        ("kv_budget=9: too many", "kv_budget"),
        ("something else", None),
    ],
)
def test_the_field_of_a_refusal(message: str, param: str | None) -> None:
    fields = ("top_k", "logit_bias", "messages", "kv_budget")
    assert refused(ValueError(message), fields, "prompt").param == param
