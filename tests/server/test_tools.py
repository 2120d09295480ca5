"""Tool calls: the requests that are understood, and the parser against any cut of its text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.template import render
from engine.server.errors import FieldError
from engine.server.tool_parser import Arguments, CallStart, Event, Text, ToolCallParser
from engine.server.tools import (
    Answer,
    ToolUse,
    collect,
    parse_answer,
    read_tools,
    template_messages,
    tool_call_delta,
    why_no_tools,
)

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}

# what Qwen3's template does with tools and earlier calls, shortened
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse(*pieces: str) -> Answer:
    parser = ToolCallParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return collect([*events, *parser.finish()])


def test_calls_and_the_text_around_them() -> None:
    text = "Let me look.\n" + call("f", '{"a": 1}') + "\n" + call("g", "{}") + "\n"
    assert parse_answer(text) == Answer("Let me look.", (("f", '{"a": 1}'), ("g", "{}")))
    text = call("f", "{}") + "\n\nDone <b>.\n"
    assert parse_answer(text) == Answer("\n\nDone <b>.\n", (("f", "{}"),))


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>', (("f", '{"a": "}"}'),)),
        ('<tool_call>{"name": "f"}</tool_call>', (("f", "{}"),)),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', (("f", "{}"),)),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', (("f", '{"a": 1}'),)),
        ('<tool_call>{"name": "\\u0066", "arguments": {}}</tool_call>', (("f", "{}"),)),
        ('<tool_call>{"name": "f", "id": 1, "arguments": {"é": 2}}', (("f", '{"é": 2}'),)),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>',
            (("f", '{"a": 1}'),),
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', (("f", "{}"),)),  # the end tag is forgotten
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', (("f", "{}"),)),
        ('<tool_call>{"name": "f", "arguments": {"a": {}</tool_call>', (("f", '{"a": {}'),)),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}',
            (("f", '{"a": "</tool_call>"}'),),
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": "un', (("f", '{"a": "un'),)),  # cut
    ],
)
def test_forms_that_count(text: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert parse_answer(text) == Answer("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>not json</tool_call>",
        "<tool_call></tool_call>",
        '<tool_call>{"name": }</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no"}</tool_call>',
        '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "<tool_call>{'name': 'f'}</tool_call>",
        '<tool_call>{"name": "f", "argum',
        '  <tool_call>{"name": "a<b',
        "a </tool_call> b <tool_cal",
        '<tool_call>{"arguments":' + '{"a":' * 5000 + "1" + "}" * 5001 + "</tool_call>",
    ],
)
def test_malformed_calls_stay_text(text: str) -> None:
    assert parse_answer(text) == Answer(text, ())


def test_a_good_call_behind_a_bad_one() -> None:
    text = "<tool_call>{oops <tool_call>" + '{"name": "f", "arguments": {}}</tool_call>'
    assert parse_answer(text) == Answer("<tool_call>{oops ", (("f", "{}"),))


def test_the_name_comes_first_then_the_arguments_as_they_are_written() -> None:
    parser = ToolCallParser()
    seen: list[tuple[str, list[Event]]] = []
    for piece in (
        "a",
        "b\n<tool",
        '_call>{"name": "f',
        '", "arguments": ',
        "{",
        '"x": "y',
        '"}',
        "}",
    ):
        seen.append((piece, parser.feed(piece)))
    assert [events for _, events in seen] == [
        [Text("a")],
        [Text("b")],
        [],
        [],
        [CallStart(0, "f"), Arguments(0, "{")],
        [Arguments(0, '"x": "y')],
        [Arguments(0, '"}')],
        [],
    ]
    assert parser.finish() == []
    begun = tool_call_delta(CallStart(0, "f"))
    assert begun.pop("id") != tool_call_delta(CallStart(0, "f"))["id"]
    function = {"name": "f", "arguments": ""}
    assert begun == {"index": 0, "type": "function", "function": function}
    assert tool_call_delta(Arguments(0, "{")) == {"index": 0, "function": {"arguments": "{"}}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(("<tool_call>", "</tool_call>", '\\"', "{", "}")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.from_regex(r"[A-Za-z0-9_.:/-]{1,12}", fullmatch=True)
CALLS = st.lists(
    st.tuples(NAMES, st.dictionaries(st.text(max_size=5), JSON, max_size=3)), max_size=3
)
CUTS = st.lists(st.integers(1, 9))


def pieces(text: str, cuts: list[int]) -> list[str]:
    found, at = [], 0
    for size in cuts:
        found.append(text[at : at + size])
        at += size
    return [*found, text[at:]]


@given(CALLS, st.text(alphabet="ab<tol_>{}\n ", max_size=12), CUTS, st.data())
def test_what_was_called_is_what_is_read_however_it_is_cut(
    calls: list[tuple[str, dict[str, Any]]], before: str, cuts: list[int], data: st.DataObject
) -> None:
    def spell(name: str, arguments: dict[str, Any]) -> str:
        parts = [("name", name), ("arguments", arguments)]
        swapped = data.draw(st.booleans())
        indent = data.draw(st.sampled_from((None, 2)))
        ascii_only = data.draw(st.booleans())
        whole = dict(reversed(parts) if swapped else parts)
        return json.dumps(whole, indent=indent, ensure_ascii=ascii_only)

    spelled = [f"<tool_call>\n{spell(*each)}\n</tool_call>" for each in calls]
    text = before + "\n" + "\n".join(spelled)
    answer = parse(*pieces(text, cuts))
    assert answer.content == (before.rstrip(" \n") if calls else before + "\n")
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == calls
    assert answer == parse_answer(text)


FRAGMENTS = st.sampled_from(
    (
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "_call>",
        '{"name": "f", ',
        '"arguments": ',
        "{",
        "}",
        '"',
        "\\",
        '"a": 1',
        ",",
        "\n",
        " ",
        "<",
        "x",
        "[",
        "]",
        ":",
        '{"arguments": {}, "name": "g"}',
        "é",
    )
)


@given(st.lists(FRAGMENTS, max_size=25).map("".join), CUTS)
def test_any_text_in_any_pieces(text: str, cuts: list[int]) -> None:
    whole = parse_answer(text)
    assert parse(*pieces(text, cuts)) == whole
    assert parse(*text) == whole
    if not whole.calls:
        assert whole.content == text


def test_time_is_linear() -> None:
    start = time.perf_counter()
    for unit in ('<tool_call>{"', "<tool_call>{", '<tool_call>{"a" "', "<tool_call>\n", "\n", "{"):
        parse(*(unit * 4000))
    assert time.perf_counter() - start < 5


# requests


def test_what_is_asked() -> None:
    tools = (WEATHER, CLOCK)
    names = ("weather", "clock")
    assert read_tools({}) is None
    assert read_tools({"tools": [], "tool_choice": "auto"}) is None
    assert read_tools({"tools": [WEATHER], "tool_choice": "none"}) is None
    assert read_tools({"tools": [WEATHER, CLOCK]}) == ToolUse(tools=tools, names=names)
    one = read_tools({"tools": [CLOCK], "parallel_tool_calls": False, "tool_choice": "required"})
    assert one == ToolUse(tools=(CLOCK,), names=("clock",), choice="required", parallel=False)
    assert one.stop == ("</tool_call>",)
    named = {"type": "function", "function": {"name": "clock"}}
    use = read_tools({"tools": [WEATHER, CLOCK], "tool_choice": named})
    assert use == ToolUse(tools=tools, names=("clock",), choice="required")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"function": {"name": "a", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [{"function": {"name": "a", "description": 1}}]},
            "tools[0].function.description",
        ),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [CLOCK], "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ],
)
def test_wrong_requests_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as error:
        read_tools(body)
    assert error.value.param == param


def test_formats_of_models() -> None:
    assert why_no_tools(TEMPLATE, ()) is None
    quoted = r"""{% if tools %}{{- "<tool_call>\n{\"name\": <function-name>}" }}{% endif %}"""
    assert why_no_tools(quoted, ()) is None
    for template, special, words in (
        (None, (), "no place for them"),
        ("{{ messages }}", (), "no place for them"),
        ("{{ tools }}[TOOL_CALLS]", (), "another format"),
        (TEMPLATE + "<function=name>", (), "another format"),
        (TEMPLATE, ("<tool_call>",), "special token"),
    ):
        assert words in (why_no_tools(template, special) or "")


def test_a_conversation_with_calls_is_shown_as_the_model_wrote_it() -> None:
    """Arguments come back from clients as JSON text, which a template would quote once more."""
    past = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "go", "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]
    shown = template_messages(messages)
    assert "tool_calls" not in shown[0]
    text = render(TEMPLATE, shown, tools=[WEATHER], variables={})
    assert '{"name": "f", "arguments": {"a": "é"}}' in text
    assert '"name": "weather"' in text
    for arguments in ("{", "[1]", 3):
        bad = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(FieldError, match=r"messages\[0\].tool_calls\[0\].function.arguments"):
            template_messages([{"role": "assistant", "tool_calls": [bad]}])
