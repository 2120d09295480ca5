"""What a request says of its answer's form, and that required calls are what the parser reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from engine import Engine, ReasoningSpec, SamplingParams
from engine.request import Grammar
from engine.server.errors import FieldError
from engine.server.formats import read_format
from engine.server.tools import ToolUse, parse_answer, read_tools
from tests.scripted import tiny_folder, tiny_spec

MOVE: dict[str, Any] = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/place"}, "fast": {"type": "boolean"}},
    "required": ["to"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["here", "there"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "stop"}},
]


def schema_of(schema: object, **more: Any) -> dict[str, Any]:
    named = {"name": "x", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def test_formats() -> None:
    assert read_format({}, None) is None
    assert read_format({"response_format": None}, None) is None
    assert read_format({"response_format": {"type": "text"}}, None) is None
    any_object = read_format({"response_format": {"type": "json_object"}}, None)
    assert any_object == Grammar("json_schema", '{"type": "object"}')
    schema = {"type": "string"}
    assert read_format(schema_of(schema, strict=True, description="d"), None) == Grammar(
        "json_schema", json.dumps(schema)
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "regex"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {}}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (schema_of(None), "response_format.json_schema.schema"),
        (schema_of("{}"), "response_format.json_schema.schema"),
        (schema_of({}, extra=1), "response_format.json_schema.extra"),
    ],
)
def test_wrong_formats_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as error:
        read_format(body, None)
    assert error.value.param == param


def test_a_format_and_a_required_call() -> None:
    use = read_tools({"tools": TOOLS, "tool_choice": "required"})
    with pytest.raises(FieldError, match="can't be kept"):
        read_format(schema_of({}), use)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_folder(Path(tmp_path_factory.mktemp("model")) / "tiny")
    with Engine(tiny_spec(folder, reasoning=ReasoningSpec())) as engine:
        yield engine


def answers(engine: Engine, body: dict[str, Any], use: ToolUse | None) -> list[str]:
    grammar = read_format(body, use)
    params = SamplingParams(n=24, seed=4, temperature=3.0, max_tokens=400, grammar=grammar)
    (output,) = engine.generate("Hi", params)
    assert {choice.finish_reason for choice in output.choices} == {"stop"}
    return [choice.text for choice in output.choices]


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    assert jsonschema_rs.is_valid(MOVE, value) if name == "move" else value == {}


@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_made(engine: Engine, parallel: bool) -> None:
    """By a model of random weights, which would call nothing."""
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    names, counts = set(), set()
    for text in answers(engine, body, read_tools(body)):
        answer = parse_answer(text)
        assert answer.content == ""
        counts.add(len(answer.calls))
        for call in answer.calls:
            check_call(*call)
            names.add(call[0])
    assert names == {"move", "stop"}
    assert counts == {1} if not parallel else min(counts) == 1


def test_a_named_call_is_made(engine: Engine) -> None:
    choice = {"type": "function", "function": {"name": "move"}}
    body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    for text in answers(engine, body, read_tools(body)):
        ((name, arguments),) = parse_answer(text).calls
        assert name == "move"
        check_call(name, arguments)


def test_a_format_beside_tools_is_kept_or_they_are_called(engine: Engine) -> None:
    schema = {"enum": [["<tool"], "b"]}
    body = {"tools": TOOLS, "parallel_tool_calls": False, **schema_of(schema)}
    kinds = set()
    for text in answers(engine, body, read_tools(body)):
        answer = parse_answer(text)
        kinds.add(bool(answer.calls))
        if answer.calls:
            assert answer.content == ""
            check_call(*answer.calls[0])
        else:
            assert jsonschema_rs.is_valid(schema, json.loads(answer.content))
    assert kinds == {True, False}


def test_a_client_s_options_do_not_loosen_the_form(engine: Engine) -> None:
    loose = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    loose["x-guidance"] = {"whitespace_flexible": True, "lenient": True}
    body = {"tools": TOOLS, **schema_of(loose)}
    for use in (None, read_tools(body)):
        texts = answers(engine, body, use)
        assert {text for text in texts if not parse_answer(text).calls} <= {"[1, 1]"}
