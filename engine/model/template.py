"""Chat templates: messages to the prompt that a model was trained on.

A template is a stranger's program: it runs in jinja2's immutable sandbox, with the settings and
helpers of Hugging Face's `apply_chat_template`, and whatever it raises is a ValueError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt. ValueError: bad messages, or the template's own error with its message."""
    names = {"documents": None, **variables}
    names |= {
        "messages": check_messages(messages),
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render(names)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"chat template: {error.message}") from error
    except Exception as error:  # the template is foreign code: it may fail in any way
        raise ValueError(f"chat template: {type(error).__name__}: {error}") from error


def variables_of(template: str) -> frozenset[str]:
    """The names that a template reads from outside. ValueError: its syntax is wrong."""
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as templates want them: every content a string, or None beside tool calls."""
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError(
            'messages must be a list of at least one {"role": ..., "content": ...}, '
            f"not {'an empty one' if messages in ([], ()) else type(messages).__name__}"
        )
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f'{where} must be {{"role": ..., "content": ...}}, not {message!r}')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role must be a non-empty string, not {role!r}")
    if "content" not in message and role != "assistant":
        raise ValueError(f"{where}.content is missing")
    content = _content(message.get("content"), f"{where}.content")
    if content is None and not message.get("tool_calls"):
        content = ""  # templates add it to strings; only beside tool calls do they ask for none
    return {**message, "content": content}


def _content(content: object, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{where} must be a string, a list of text parts or None")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ValueError(f'{where} must be {{"type": "text", "text": "..."}}, not {part!r}')


class _Generation(Extension):
    """Training's {% generation %} tag marks what an assistant said; here its body is just text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: jinja2's own filter would escape it for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env
