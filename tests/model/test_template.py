"""Chat templates: Hugging Face's settings and helpers, and errors in the template's own words."""

from __future__ import annotations

from typing import Any

import pytest

from engine.model.template import check_messages, render

HI = [{"role": "user", "content": "Hi"}]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def rendered(template: str, messages: Any = HI, **variables: Any) -> str:
    return render(template, messages, variables=variables)


def test_chatml() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HI]
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert rendered(CHATML, messages) == prompt + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False, variables={}) == prompt


def test_blocks_are_trimmed() -> None:
    assert rendered("  {% if true %}\nyes\n  {% endif %}\n.") == "yes\n."


def test_loop_controls() -> None:
    template = "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert rendered(template) == "1"


def test_generation_tag_is_its_body() -> None:
    template = (
        "{% for m in messages %}[{% generation %}{{ m.content }}{% endgeneration %}]{% endfor %}"
    )
    assert rendered(template) == "[Hi]"


def test_tojson_is_for_models_not_for_html() -> None:
    value = {"b": "<\u00e9'&>", "a": [1]}
    assert rendered("{{ x | tojson }}", x=value) == '{"b": "<\u00e9\'&>", "a": [1]}'
    assert rendered("{{ x | tojson(indent=2, sort_keys=true) }}", x={"b": 1, "a": 2}) == (
        '{\n  "a": 2,\n  "b": 1\n}'
    )


def test_strftime_now() -> None:
    assert rendered("{{ strftime_now('%Y') }}").isdigit()


def test_variables_and_tools() -> None:
    prompt = render(
        "{{ bos_token }}{{ tools[0].name }}{{ documents is none }}{{ enable_thinking }}",
        HI,
        tools=[{"name": "f"}],
        variables={"bos_token": "<s>", "enable_thinking": False},
    )
    assert prompt == "<s>fTrueFalse"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{{ raise_exception('Only user and assistant roles!') }}",
            "Only user and assistant roles!",
        ),
        ("{{ nowhere.field }}", "'nowhere' is undefined"),
        ("a\n{% if %}", "line 2"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_templates_error_is_a_value_error(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rendered(template)


def test_contents() -> None:
    calls = [{"function": {"name": "f", "arguments": {}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "assistant", "content": None},
        {"role": "assistant", "reasoning_content": "kept"},
        {"role": "user", "content": ""},
    ]
    checked = check_messages(messages)
    assert [message["content"] for message in checked] == ["a\nb", None, "", "", ""]
    assert checked[1]["tool_calls"] == calls
    assert checked[3]["reasoning_content"] == "kept"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one"),
        ("Hi", "must be a list"),
        ([*HI, "Hi"], r"messages\[1\] must be"),
        ([{"content": "Hi"}], r"messages\[0\].role"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]"),
    ],
)
def test_bad_messages_are_named(messages: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rendered(CHATML, messages)
