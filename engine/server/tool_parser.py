"""Tool calls in a model's text, as it comes, in the format of Hermes and Qwen models:
`<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

A call counts from the moment when its name is complete and its arguments begin; from there on they
are passed as the model writes them, as OpenAI's API does, so an output that is cut leaves arguments
that are no JSON. What is malformed before that moment stays text, and so does everything outside.
White space beside calls is dropped.

Every decision is made at a character, so the events, put together, don't depend on how the text was
cut. Time is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_SPACE = " \t\r\n"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<]{1,256})"\s*,\s*"arguments"\s*:\s*')
_OUTSIDE_STRINGS = frozenset(_SPACE + "{}[],:+-.0123456789abcdefghijklmnopqrstuvwxyzE")


class Text(NamedTuple):
    """Content, outside every call."""

    text: str


class CallStart(NamedTuple):
    """A call's name; `call` counts the calls of the answer from 0."""

    call: int
    name: str


class Arguments(NamedTuple):
    """The next piece of a call's arguments, as JSON text."""

    call: int
    text: str


Event = Text | CallStart | Arguments


@dataclass(slots=True)
class _Json:
    """How deep in an object a reader is."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def takes(self, char: str) -> bool:
        """Whether the character can stand here, in a JSON object or in the space before it."""
        if self.in_string:
            return True
        if self.depth == 0:
            return char in _SPACE + "{"
        return char == '"' or char in _OUTSIDE_STRINGS

    def step(self, char: str) -> None:
        if self.escaped:
            self.escaped = False
        elif self.in_string:
            self.escaped, self.in_string = char == "\\", char != '"'
        elif char == '"':
            self.in_string = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1


class ToolCallParser:
    """One answer's text -> events. `feed` pieces, then `finish`."""

    def __init__(self) -> None:
        self.calls = 0
        self._unread = ""
        self._space = ""  # before the call under way
        self._body = ""  # of the call under way, until it counts
        self._json = _Json()
        self._fresh = False  # a call has just ended
        self._events: list[Event] = []
        self._state: Callable[[], bool] = self._outside

    def feed(self, text: str) -> list[Event]:
        self._unread += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The text is over: what still waited is text, or the end of a call."""
        if self._state == self._in_body:
            self._say(self._space + OPEN + self._body)
        elif self._state == self._outside and not (self._fresh and not self._unread.strip(_SPACE)):
            self._say(self._unread)
        self._unread, self._state = "", self._outside
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Text(text))
            self._fresh = False

    # states: each reads on; False: it needs more text

    def _outside(self) -> bool:
        before, tag, after = self._unread.partition(OPEN)
        part = "" if tag else _begun(before, OPEN)
        text = before[: len(before) - len(part)]
        kept = text.rstrip(_SPACE)
        self._say(kept)
        if not tag:
            self._unread = text[len(kept) :] + part
            return False
        self._space, self._unread = text[len(kept) :], after
        self._body, self._json = "", _Json()
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        for at, char in enumerate(self._unread):
            if not self._json.takes(char):
                return self._malformed(at)
            self._json.step(char)
            if char == "{" and self._json.depth == 2 and not self._json.in_string:
                head = _HEAD.fullmatch(self._body + self._unread[:at])
                if head is not None:
                    self._start(head[1], "{")
                    return self._go(self._in_arguments, at + 1)
            elif self._json.depth == 0 and char in "}]":
                return self._whole(at + 1)
        self._body += self._unread
        self._unread = ""
        return False

    def _malformed(self, end: int) -> bool:
        self._say(self._space + OPEN + self._body + self._unread[:end])
        return self._go(self._outside, end)

    def _whole(self, end: int) -> bool:
        """A call whose parts aren't in the usual order, seen to its end."""
        call = read_call(self._body + self._unread[:end])
        if call is None:
            return self._malformed(end)
        self._start(*call)
        return self._go(self._behind, end)

    def _start(self, name: str, arguments: str) -> None:
        self._events += (CallStart(self.calls, name), Arguments(self.calls, arguments))
        self.calls += 1

    def _in_arguments(self) -> bool:
        for at, char in enumerate(self._unread):
            if char == "<" and not self._json.in_string:  # no JSON any more: it ends as it is
                self._argue(self._unread[:at])
                return self._go(self._behind, at)
            self._json.step(char)
            if self._json.depth == 1:
                self._argue(self._unread[: at + 1])
                return self._go(self._in_rest, at + 1)
        self._argue(self._unread)
        self._unread = ""
        return False

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self.calls - 1, text))

    def _in_rest(self) -> bool:
        """Of the call's object, behind its arguments: nothing that counts."""
        for at, char in enumerate(self._unread):
            if char == "<" and not self._json.in_string:
                return self._go(self._behind, at)
            self._json.step(char)
            if self._json.depth == 0:
                return self._go(self._behind, at + 1)
        self._unread = ""
        return False

    def _behind(self) -> bool:
        """A call is complete; the closing tag, and a brace too many, belong to it."""
        rest = self._unread.lstrip(_SPACE + "}")
        self._fresh = True
        if rest.startswith(CLOSE):
            self._unread = rest[len(CLOSE) :]
        elif CLOSE.startswith(rest):
            return False
        self._state = self._outside
        return True

    def _go(self, state: Callable[[], bool], read: int) -> bool:
        self._unread = self._unread[read:]
        self._state = state
        return True


def _begun(text: str, tag: str) -> str:
    """The longest end of `text` that a tag may begin with."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return tag[:size]
    return ""


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's whole object, in any order; None: it is none.

    Arguments may be an object or the JSON text of one; a call without any has none to give.
    """
    call = _loads(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return (call["name"], arguments) if isinstance(_loads(arguments), dict) else None
    if arguments is None and set(call) <= {"name", "arguments"}:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _loads(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
