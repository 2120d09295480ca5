"""Requests that nobody should answer with 200, and bodies of which nobody knows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from tests.server.live import USER, strict

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class Sent(NamedTuple):
    """`refused`: it must be; else it may, by chance, be a good one."""

    path: str
    data: bytes
    headers: dict[str, str]
    refused: bool = True

    def check(self, response: httpx.Response) -> None:
        """Refused in OpenAI's words, or answered."""
        said = (self.path, self.data[:200], response.status_code, response.text[:300])
        if response.status_code == 200:
            assert not self.refused, said
            return
        assert 400 <= response.status_code < 500, said
        body = strict(response.text)
        assert set(body) == {"error"}, said
        assert set(body["error"]) == {"message", "type", "param", "code"}, said
        assert 0 < len(body["error"]["message"]) < 600, said


_JSON = {"content-type": "application/json"}

_BAD_FIELDS: tuple[tuple[str, Any], ...] = (
    ("temperature", -1),
    ("temperature", "hot"),
    ("temperature", 1e400),
    ("top_p", 2),
    ("top_k", [1]),
    ("min_p", -0.5),
    ("n", 0),
    ("n", 10**30),
    ("max_tokens", -3),
    ("max_tokens", 10**9),
    ("max_tokens", 1.5),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("logit_bias", []),
    ("allowed_token_ids", []),
    ("stop_token_ids", [10**12]),
    ("stop", ["x"] * 500),
    ("stop", 7),
    ("seed", "one"),
    ("stream", "true"),
    ("stream_options", 3),
    ("model", "no-such-model"),
    ("model", {}),
    ("request_id", "a b\n"),
    ("thinking_token_budget", -5),
    ("kv_budget", 10**9),
)
_BAD_PROMPTS: tuple[Any, ...] = (
    *("", [], [[]], ["", "x"], [-1], [10**9], [1.5], [True], {}, None, 5, "\ud800", "x " * 5000),
)
_BAD_MESSAGES: tuple[Any, ...] = (
    *([], None, "hi", {}, [None], [{}], [{"role": "user", "content": 5}]),
    [{"role": "king", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": "x " * 5000}],
)


def good(path: str, **fields: Any) -> dict[str, Any]:
    first = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    return {**first, "max_tokens": 2, **fields}


def malformed(choose: random.Random) -> Sent:
    path = choose.choice((CHAT, COMPLETIONS))
    return choose.choice(_KINDS)(choose, path)


def _encoded(path: str, body: Any) -> Sent:
    return Sent(path, json.dumps(body).encode(), _JSON)


def _bad_field(choose: random.Random, path: str) -> Sent:
    name, value = choose.choice(_BAD_FIELDS)
    return _encoded(path, good(path, **{name: value}))


def _bad_prompt(choose: random.Random, path: str) -> Sent:
    if path == CHAT:
        return _encoded(path, good(path, messages=choose.choice(_BAD_MESSAGES)))
    return _encoded(path, good(path, prompt=choose.choice(_BAD_PROMPTS)))


def _cut(choose: random.Random, path: str) -> Sent:
    data = json.dumps(good(path, user="x" * 50)).encode()
    return Sent(path, data[: choose.randrange(len(data))], _JSON)


def _noise(choose: random.Random, path: str) -> Sent:
    return Sent(path, b"\xff" + choose.randbytes(choose.randrange(2000)), _JSON)


def _other_json(choose: random.Random, path: str) -> Sent:
    return Sent(path, choose.choice((b"[]", b"7", b'"x"', b"null", b"NaN", b"true", b"{}")), _JSON)


def _deep(choose: random.Random, path: str) -> Sent:
    depth = choose.choice((200, 100_000))
    return Sent(path, b'{"prompt":' + b"[" * depth + b"]" * depth + b"}", _JSON)


def _other_kind(choose: random.Random, path: str) -> Sent:
    data = json.dumps(good(path)).encode()
    return Sent(path, data, {"content-type": choose.choice(("text/plain", "multipart/form-data"))})


def _other_path(choose: random.Random, path: str) -> Sent:
    data = json.dumps(good(path)).encode()
    return Sent(path + choose.choice(("/", "/x", "%00", "/..%2f")), data, _JSON)


def _mutated(choose: random.Random, path: str) -> Sent:
    data = bytearray(json.dumps(good(path, temperature=1, n=1, stop=["x"])).encode())
    for _ in range(choose.randrange(1, 4)):
        data[choose.randrange(len(data))] = choose.randrange(256)
    return Sent(path, bytes(data), _JSON, refused=False)


_KINDS: tuple[Callable[[random.Random, str], Sent], ...] = (
    *(_bad_field, _bad_field, _bad_prompt, _cut, _noise, _other_json, _deep, _other_kind),
    *(_other_path, _mutated),
)
