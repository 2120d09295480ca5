"""The form that a request asks its answer to have, as a grammar: JSON, or calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.request import Grammar
from engine.server.errors import FieldError
from engine.server.fields import known_keys, mapping, one_of
from engine.server.tool_parser import CLOSE, OPEN
from engine.server.tools import ToolUse

FORMATS = ("text", "json_object", "json_schema")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_ON_ONE_LINE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
"""What `Grammar` says of JSON, for schemas inside a grammar; a client's own options don't count."""


def read_format(body: Mapping[str, Any], tools: ToolUse | None) -> Grammar | None:
    """`response_format` and a required call. None: the answer is free. FieldError.

    With both a format and tools that may be called, the answer has the format or is calls.
    """
    schema = _schema(body)
    if tools is not None and tools.choice == "required":
        if schema is not None:
            raise FieldError("response_format", "can't be kept where tool_choice requires a call")
        return Grammar("lark", "start: calls\n" + _calls(tools))
    if schema is None:
        return None
    if tools is None:
        return Grammar("json_schema", _text(schema))
    answer = f"start: answer | calls\nanswer: {_json(schema)}\n"
    return Grammar("lark", answer + _calls(tools))


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    where = "response_format"
    if body.get(where) is None:
        return None
    given = mapping(body[where], where)
    known_keys(given, ("type", "json_schema"), where)
    kind = one_of(given.get("type"), FORMATS, f"{where}.type")
    if kind != "json_schema":
        if given.get("json_schema") is not None:
            raise FieldError(f"{where}.json_schema", f"has no meaning with the type {kind}")
        return _ANY_OBJECT if kind == "json_object" else None
    where += ".json_schema"
    named = mapping(given.get("json_schema"), where)
    known_keys(named, ("name", "description", "schema", "strict"), where)
    schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise FieldError(f"{where}.schema", f"must be a JSON schema, not {schema!r:.100}")
    return schema


def _calls(tools: ToolUse) -> str:
    """Lark rules for `calls`: those of the names that may be called."""
    rules = []
    for tool in tools.tools:
        function = tool["function"]
        if function["name"] in tools.names:
            parameters = {**function.get("parameters", _NO_ARGUMENTS), "type": "object"}
            head = _text(f'{OPEN}\n{{"name": "{function["name"]}", "arguments": ')
            rules.append(f"{head} {_json(parameters)} {_text('}' + chr(10) + CLOSE)}")
    several = r'call ("\n" call)*' if tools.parallel else "call"
    names = [f"call_{i}" for i in range(len(rules))]
    each = "\n".join(f"{name}: {rule}" for name, rule in zip(names, rules, strict=True))
    return f"calls: {several}\ncall: {' | '.join(names)}\n{each}\n"


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + _text({**schema, "x-guidance": _ON_ONE_LINE})


def _text(value: object) -> str:
    try:
        return json.dumps(value)
    except RecursionError as error:
        raise FieldError("response_format", "has a schema that is nested too deep") from error
