r"""What a chat completion says, told apart into chain and answer, whichever way a server spells it.

Servers put thinking into `reasoning_content` or `reasoning`, or leave it in the content between
`<think>` and `</think>` (the first often stands in the prompt). Markers are found as text here: a
server doesn't tell token ids. Where there is no thinking, the chain is what stands before the last
`\boxed{`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bench.evaluation.records import Generation, before_answer

Encode = Callable[[str], list[int]]
"""Text to token ids, without BOS."""

START, END = "<think>", "</think>"

_MARKERS = re.compile(f"({START}|{END})")
_FAILED = ("abort", "error")
_FINISH_REASONS = ("stop", "length", *_FAILED)


class Parts(NamedTuple):
    """An answer's text. `whole` is as it was generated, without the markers that a server took out;
    `chain` is that part of it that counts as reasoning."""

    thinking: str
    text: str
    chain: str
    whole: str
    closed: bool | None


def generation_from(body: Any, seconds: float, encode: Encode | None) -> Generation:
    """From a response's JSON. ValueError: it lacks what a measurement needs."""
    choice, message = _choice(body)
    finish_reason = _finish_reason(choice)
    parts = split(message, finish_reason)
    token_ids = None if encode is None else tuple(encode(parts.whole))
    usage = _mapping(body.get("usage"))
    output_tokens = _count(usage.get("completion_tokens"))
    if not output_tokens and (parts.whole or output_tokens is None):  # some say 0 for "not counted"
        if token_ids is None:
            raise ValueError("the server's answer has no usage.completion_tokens: give --tokenizer")
        output_tokens = len(token_ids)
    thinking_tokens = _reported(usage, parts)
    if thinking_tokens is None:
        thinking_tokens = _counted(parts, output_tokens, encode)
    thinking_tokens = min(thinking_tokens, output_tokens)
    return Generation(
        text=parts.text,
        thinking=parts.thinking,
        finish_reason=finish_reason,
        prompt_tokens=_count(usage.get("prompt_tokens")) or 0,
        output_tokens=output_tokens,
        thinking_tokens=thinking_tokens,
        answer_tokens=output_tokens - thinking_tokens,
        closed=parts.closed,
        seconds=seconds,
        token_ids=token_ids,
        error=f"the server ended it with {finish_reason!r}" if finish_reason in _FAILED else None,
    )


def split(message: Mapping[str, Any], finish_reason: str) -> Parts:
    """Thinking and answer of one message; an empty reasoning field is none."""
    content = _text(message, "content")
    reasoning = _text(message, "reasoning_content") or _text(message, "reasoning")
    if reasoning:
        cut = finish_reason == "length" and not content
        return Parts(reasoning, content, reasoning, reasoning + content, not cut)
    if END in content or START in content:
        thinking, text, closed = _split_markers(content)
        return Parts(thinking, text, thinking, content, closed)
    return Parts("", content, before_answer(content), content, None)


def _split_markers(content: str) -> tuple[str, str, bool]:
    """All blocks together; an end marker that comes first closes what the prompt opened."""
    pieces = _MARKERS.split(content)  # text, marker, text, marker, ..., text
    opened = pieces[1] == END
    thinking: list[str] = []
    text: list[str] = []
    for piece in pieces:
        if piece in (START, END):
            opened = piece == START
        else:
            (thinking if opened else text).append(piece)
    return "".join(thinking), "".join(text), not opened


def _choice(body: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    choices = _mapping(body).get("choices")
    choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
    if not isinstance(choice.get("message"), Mapping):
        raise ValueError(f"the server's answer is no chat completion: {str(body)[:300]}")
    return choice, choice["message"]


def _finish_reason(choice: Mapping[str, Any]) -> str:
    """Servers have reasons of their own ("repetition", "tool_calls"); in all of them it stopped."""
    reason = choice.get("finish_reason")
    return reason if reason in _FINISH_REASONS else "stop"


def _reported(usage: Mapping[str, Any], parts: Parts) -> int | None:
    """The server's own count. Some say 0 whatever was thought, or for want of a marker."""
    details = _mapping(usage.get("completion_tokens_details"))
    tokens = _count(details.get("reasoning_tokens"))
    return tokens if tokens or not parts.chain else None


def _counted(parts: Parts, output_tokens: int, encode: Encode | None) -> int:
    if parts.chain == parts.whole:
        return output_tokens
    if encode is not None:
        return len(encode(parts.chain))
    return round(output_tokens * len(parts.chain) / len(parts.whole))


def _text(message: Mapping[str, Any], name: str) -> str:
    """Empty for null or no field. Half a surrogate pair, which JSON lets through, becomes "?"."""
    value = message.get(name)
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
