"""Thinking, tools, formats and cache budgets over a socket, by openai-python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.cache.policy import KVSpec
from engine.cache.registry import policy_from_text
from engine.config import EngineConfig, ModelSpec
from engine.prompt import Chat
from engine.scheduler.controllers.loop_guard import LoopGuard
from tests.scripted import tiny_spec
from tests.server.live import NAME, USER, Live, serving
from tests.server.test_tools import CLOCK, TEMPLATE, WEATHER, call
from tests.tiny import tiny_config, tiny_tensors, write_folder

SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}"
)


def with_template(path: Path, template: str) -> str:
    config = tiny_config()
    folder = write_folder(path, config, tiny_tensors(config, 0))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return str(folder)


def create(live: Live, **fields: Any) -> Any:
    """A completion, or all chunks of a stream."""
    with live.client() as client:
        made = client.chat.completions.create(**{"model": NAME, "messages": USER, **fields})
        return list(made) if fields.get("stream") else made


def refusal(live: Live, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        create(live, **fields)
    return caught.value


# thinking


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"extra_body": {"thinking_token_budget": 5}}, 5),
        ({"extra_body": {"thinking_budget_tokens": 0}}, 0),
        ({"extra_body": {"reasoning": {"max_tokens": 4}}}, 4),
        ({"extra_body": {"thinking": {"type": "enabled", "budget_tokens": 3}}}, 3),
        ({"extra_body": {"chat_template_kwargs": {"thinking_budget": 2}}}, 2),
        ({"extra_body": {"custom_params": {"thinking_budget": 6}}}, 6),
        ({"reasoning_effort": "low"}, 7),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "high"}, None),
        ({"extra_body": {"thinking_token_budget": -1}}, None),
    ],
)
def test_a_budget_is_exact_under_every_spelling(
    config: EngineConfig, fields: dict[str, Any], budget: int | None
) -> None:
    with serving(config, reasoning_efforts="low=7,high=none") as live:
        live.says("<think>" + "abcdefghij" * 3 + "</think>42")
        completion = create(live, max_tokens=120, **fields)
        details = completion.usage.completion_tokens_details
        thought = "abcdefghij" * 3 if budget is None else ("abcdefghij" * 3)[:budget]
        assert details.reasoning_tokens == len(thought)
        message = completion.choices[0].message
        assert "think>" not in message.content
        closed = 0 if budget is None else 1
        assert live.metric("taut:early_stops_total") == closed


def test_budgets_hold_at_every_turn(live: Live) -> None:
    history = [
        *USER,
        {"role": "assistant", "content": "4", "reasoning_content": "a long thought"},
        *USER,
    ]
    live.says("<think>abcdefgh", Chat(messages=history))
    completion = create(live, messages=history, extra_body={"thinking_token_budget": 3})
    assert completion.usage.completion_tokens_details.reasoning_tokens == 3


def test_thinking_is_switched_by_the_template(tmp_path: Path) -> None:
    with serving(tiny_spec(with_template(tmp_path / "tiny", SWITCHED))) as live:
        fields = {"enable_thinking": False, "return_token_ids": True}
        off = create(live, max_tokens=1, extra_body=fields)
        text = live.engine.engine.tokenizer.decode(off.prompt_token_ids, skip_special=False)
        assert text.endswith("<think></think>")
        error = refusal(live, extra_body={"chat_template_kwargs": {"style": "x"}})
        assert error.param == "chat_template_kwargs.style"


def test_a_loop_is_closed_and_the_model_answers(folder: str) -> None:
    with serving(tiny_spec(folder, controllers=(LoopGuard(),))) as live:
        decoder = live.says("<think>" + "wait! " * 60)
        engine, prompt = live.engine.engine, len(live.tokens(USER))
        closing, looping = engine.markers.closing, decoder.script
        end = engine.tokenizer.token_id("<|im_end|>")
        assert end is not None
        state = engine._scheduler

        def script(position: int) -> int:
            """Loops until it is closed."""
            return end if state.stats().edits else looping(position)

        decoder.script = script
        completion = create(live, max_tokens=300)
        (choice,) = completion.choices
        assert choice.finish_reason == "stop"
        thought = completion.usage.completion_tokens_details.reasoning_tokens
        assert 48 <= thought <= 64
        assert completion.usage.completion_tokens == 1 + thought + len(closing) + 1
        assert prompt + completion.usage.completion_tokens < 300
        assert live.metric("taut:loops_total") == 1
        error = refusal(live, extra_body={"repetition_detection": {"min_count": 3}})
        assert "--loop-guard" in error.message


# tools


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    template = TEMPLATE + "\n<|im_start|>assistant\n"
    folder = with_template(tmp_path_factory.mktemp("tools") / "tiny", template)
    with serving(tiny_spec(folder)) as live:
        yield live


TOOLS = [CLOCK, WEATHER]
ASKED = Chat(messages=USER, tools=TOOLS)
SAID = "Let me see.\n" + call("weather", '{"city": "Bern"}') + "\n" + call("clock", "{}")
CALLS = [("weather", '{"city": "Bern"}'), ("clock", "{}")]


def test_calls_of_a_whole_answer(calling: Live) -> None:
    calling.says("<think>Hm</think>" + SAID, ASKED)
    (choice,) = create(calling, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Hm"
    calls = choice.message.tool_calls
    assert [(c.function.name, c.function.arguments) for c in calls] == CALLS
    assert len({c.id for c in calls}) == 2
    calling.says(call("clock", "{}"), ASKED)
    message = create(calling, tools=TOOLS).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    calling.says("No call.", ASKED)
    (choice,) = create(calling, tools=TOOLS).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_calls_are_streamed(calling: Live) -> None:
    calling.says(SAID, ASKED)
    chunks = create(calling, tools=TOOLS, stream=True, n=2)
    for index in (0, 1):
        choices = [c.choices[0] for c in chunks if c.choices[0].index == index]
        deltas = [choice.delta for choice in choices]
        assert "".join(delta.content or "" for delta in deltas) == "Let me see."
        parts = [part for delta in deltas for part in delta.tool_calls or []]
        for number, (name, arguments) in enumerate(CALLS):
            first, *rest = [part for part in parts if part.index == number]
            assert (first.function.name, first.type) == (name, "function")
            assert first.id
            assert first.function.arguments == ""
            assert all(part.id is None and part.function.name is None for part in rest)
            assert "".join(part.function.arguments for part in rest) == arguments
        assert len([p for p in parts if p.index == 0]) > 3, "arguments come as they are written"
        assert [c.finish_reason for c in choices[-2:]] == [None, "tool_calls"]
    ids = [p.id for c in chunks for p in c.choices[0].delta.tool_calls or [] if p.id]
    assert len(set(ids)) == 4


def test_a_call_that_is_cut(calling: Live) -> None:
    calling.says(call("clock", '{"zone": "UTC"}'), ASKED)
    (choice,) = create(calling, tools=TOOLS, max_tokens=50).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone(calling: Live, stream: bool) -> None:
    calling.says(SAID, ASKED)
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        last = create(calling, stream=True, **fields)[-1].choices[0]
    else:
        last = create(calling, **fields).choices[0]
        assert [c.function.name for c in last.message.tool_calls] == ["weather"]
    assert last.finish_reason == "tool_calls"
    assert last.stop_reason is None


def test_required_calls_and_their_results(calling: Live) -> None:
    """By random weights; the conversation goes on with what the call gave."""
    move = {"type": "object", "properties": {"to": {"enum": ["a", "b"]}}, "required": ["to"]}
    tool = {"type": "function", "function": {"name": "move", "parameters": move}}
    fields = {"tools": [tool], "seed": 2, "temperature": 2.0, "parallel_tool_calls": False}
    calling.engine.engine._executors["main"].decoder = calling.engine.engine.models["main"].decoder
    choice = create(
        calling, tool_choice="required", max_tokens=200, **fields, reasoning_effort="none"
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments)["to"] in ("a", "b")
    history = [
        *USER,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "moved"},
    ]
    again = create(
        calling, messages=history, max_tokens=1, extra_body={"return_token_ids": True}, **fields
    )
    text = calling.engine.engine.tokenizer.decode(again.prompt_token_ids, skip_special=False)
    assert f'"arguments": {json.dumps(json.loads(made.function.arguments))}' in text
    assert "moved" in text


def test_tools_that_can_not_be_called(live: Live, calling: Live) -> None:
    assert refusal(live, tools=TOOLS).param == "tools"
    assert "no place" in refusal(live, tools=TOOLS).message
    bad = {"properties": {"a": {"type": "string", "pattern": "("}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad}}
    error = refusal(calling, tools=[tool], tool_choice="required")
    assert error.param == "tools"


def test_tokens_of_a_chat_with_tools(calling: Live) -> None:
    body = {"messages": USER, "tools": TOOLS}
    assert calling.post("/tokenize", body).json()["tokens"] == calling.tokens(ASKED)
    assert calling.post("/tokenize", {"prompt": "a", "tools": TOOLS}).status_code == 400


# formats

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}


def test_a_schema_binds_the_answer(live: Live) -> None:
    named = {"name": "x", "schema": SCHEMA, "strict": True}
    fields = {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 300}
    sampled = {"temperature": 3.0, "seed": 1, "reasoning_effort": "minimal"}
    (choice,) = create(live, **fields, **sampled).choices
    value = json.loads(choice.message.content)
    assert set(value) == {"city", "big"}
    assert value["city"] in ("Bern", "Rome")
    assert choice.finish_reason == "stop"
    deltas = create(live, stream=True, **fields, **sampled)
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == choice.message.content


def test_a_schema_that_nobody_can_follow(live: Live) -> None:
    named = {"name": "x", "schema": {"type": "string", "pattern": "("}}
    error = refusal(live, response_format={"type": "json_schema", "json_schema": named})
    assert error.param == "response_format"


# the cache


def test_budgets_of_the_cache(config: EngineConfig) -> None:
    kv = KVSpec(
        policy=policy_from_text("sinks_recent"), budget_tokens=64, window=16, allow_full=True
    )
    bounded = replace(config, models={"main": ModelSpec(config.models["main"].model, kv=kv)})
    with serving(bounded) as live:
        fields = {"max_tokens": 90, "temperature": 0}
        extra = {"ignore_eos": True}
        evicted = []
        for asked in ({"kv_budget": "full"}, {}, {"kv_budget": 16}):
            before = live.metric("taut:kv_cells_evicted_total")
            create(live, extra_body={**extra, **asked}, **fields)
            evicted.append(live.metric("taut:kv_cells_evicted_total") - before)
        assert 0 == evicted[0] < evicted[1] < evicted[2]
        error = refusal(live, extra_body={"kv_budget": 65})
        assert error.param == "kv_budget"
        card = live.http.get(f"/v1/models/{NAME}").json()["taut"]
        assert card["kv_budget"] == 64
        assert "full" in card["extra_body"]["kv_budget"]


def test_the_card_tells_what_is_served(live: Live, calling: Live) -> None:
    card = live.http.get(f"/v1/models/{NAME}").json()["taut"]
    assert "kv_budget" not in card["extra_body"]
    assert card["reasoning_efforts"]["low"] == 1024
    assert not card["calls_tools"]
    assert calling.http.get(f"/v1/models/{NAME}").json()["taut"]["calls_tools"]
