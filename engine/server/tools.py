"""Tools: what a request offers, what the template is given, and what the client gets of calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from engine.model.template import variables_of
from engine.server.errors import FieldError
from engine.server.fields import boolean, mapping, one_of, string
from engine.server.tool_parser import CLOSE, OPEN, Arguments, CallStart, Event, Text, ToolCallParser

MAX_TOOLS = 128
_FORMAT = re.compile(OPEN + r'(\s|\\n)*\{\s*\\?"name\\?"')  # JSON, perhaps in a template's string
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that a model may call.

    `choice`: "auto", it may answer or call; "required", it has to call one of `names`. `parallel`:
    several calls in one answer.
    """

    tools: tuple[Mapping[str, Any], ...]
    choice: Literal["auto", "required"] = "auto"
    names: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def stop(self) -> tuple[str, ...]:
        """A stop string that ends the answer behind its one call."""
        return () if self.parallel else (CLOSE,)


def read_tools(body: Mapping[str, Any]) -> ToolUse | None:
    """`tools`, `tool_choice` and `parallel_tool_calls`; None: no call can come of them.

    With the choice "none" the model isn't told of its tools. FieldError names what is wrong.
    """
    tools = _tools(body.get("tools"))
    choice = body.get("tool_choice")
    given = body.get("parallel_tool_calls")
    parallel = True if given is None else boolean(given, "parallel_tool_calls")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise FieldError("tool_choice", "needs tools, of which there are none")
        return None
    names = tuple(tool["function"]["name"] for tool in tools)
    if isinstance(choice, Mapping):
        name = _named(choice, names)
        return ToolUse(tools=tools, choice="required", names=(name,), parallel=parallel)
    kind = one_of("auto" if choice is None else choice, ("auto", "none", "required"), "tool_choice")
    if kind == "none":
        return None
    required = kind == "required"
    return ToolUse(
        tools=tools, choice="required" if required else "auto", names=names, parallel=parallel
    )


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, Seq) or isinstance(value, str | bytes) or len(value) > MAX_TOOLS:
        raise FieldError("tools", f"must be a list of at most {MAX_TOOLS} tools")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(value))
    names = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise FieldError(f"tools[{i}].function.name", f"{name!r} is there twice")
    return tools


def _tool(value: object, where: str) -> Mapping[str, Any]:
    tool = mapping(value, where)
    if tool.get("type", "function") != "function":
        raise FieldError(f"{where}.type", f"must be function, not {tool['type']!r:.100}")
    function = mapping(tool.get("function"), f"{where}.function")
    name = string(function.get("name"), f"{where}.function.name")
    if not _NAME.fullmatch(name):
        raise FieldError(
            f"{where}.function.name", f"must be 1 to 64 of A-Z a-z 0-9 _ . : / -, not {name!r:.100}"
        )
    if function.get("description") is not None and not isinstance(function["description"], str):
        raise FieldError(f"{where}.function.description", "must be a string")
    mapping(function.get("parameters"), f"{where}.function.parameters")
    # what a null stands for isn't shown to the model
    kept = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": kept}


def _named(choice: Mapping[str, Any], names: tuple[str, ...]) -> str:
    if choice.get("type") != "function":
        raise FieldError("tool_choice.type", f"must be function, not {choice.get('type')!r:.100}")
    function = mapping(choice.get("function"), "tool_choice.function")
    return one_of(function.get("name"), names, "tool_choice.function.name")


def why_no_tools(template: str | None, special: Collection[str]) -> str | None:
    """Why a model can't call tools in the format that is understood here; None if it can.

    `special` are the texts of tokens that no output shows.
    """
    if template is None or "tools" not in variables_of(template):
        return "can't be served: the model's chat template has no place for them"
    if not _FORMAT.search(template) or "<function=" in template:
        return (
            f"can't be served: the model's template asks for calls in another format than {OPEN}"
            '{"name": ..., "arguments": ...}' + CLOSE
        )
    if OPEN in special or CLOSE in special:
        return f"can't be served: {OPEN} is a special token of this model"
    return None


def template_messages(messages: Seq[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A history for the template: arguments of earlier calls as objects, not as JSON text, because
    templates write them out as JSON themselves."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, Seq) or isinstance(calls, str):
        raise FieldError(f"{where}.tool_calls", "must be a list of calls")
    read = [_past_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {**message, "tool_calls": read}


def _past_call(value: object, where: str) -> dict[str, Any]:
    call = mapping(value, where)
    function = mapping(call.get("function"), f"{where}.function")
    string(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise FieldError(f"{where}.function.arguments", f"is no JSON: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise FieldError(f"{where}.function.arguments", "must be the JSON text of an object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def tool_call_delta(event: CallStart | Arguments) -> dict[str, Any]:
    """An entry of a chunk's `tool_calls`: the name with the call's id first, then arguments."""
    if isinstance(event, Arguments):
        return {"index": event.call, "function": {"arguments": event.text}}
    return {"index": event.call, **tool_call(event.name, "")}


def tool_call(name: str, arguments: str) -> dict[str, Any]:
    """A call with an id of its own."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: its content, and its calls as (name, arguments)."""

    content: str
    calls: tuple[tuple[str, str], ...]


def parse_answer(text: str) -> Answer:
    """The same as `ToolCallParser` gives piece by piece."""
    parser = ToolCallParser()
    return collect([*parser.feed(text), *parser.finish()])


def collect(events: Seq[Event]) -> Answer:
    """Events of one answer, put together."""
    content = "".join(event.text for event in events if isinstance(event, Text))
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [""] * len(names)
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.call] += event.text
    return Answer(content, tuple(zip(names, arguments, strict=True)))
