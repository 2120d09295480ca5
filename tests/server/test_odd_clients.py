"""Clients as they shouldn't be: too slow, silent, many at once, on odd paths, with odd wishes."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.server import connection
from engine.server.connection import Connection
from tests.scripted import tiny_spec
from tests.server.live import USER, Live, serving, strict
from tests.server.sockets import connected, open_stream, request, talk
from tests.server.test_errors import error_of
from tests.server.test_reports import texts

LONG = {"max_tokens": 400, "ignore_eos": True}
THOUGHT = "<think>Let me see.</think>It is 4."


@pytest.fixture(scope="module")
def calm(config: EngineConfig) -> Iterator[Live]:
    with serving(config) as live:
        yield live


# connections


def wait_closed(live: Live, seconds: float = 10) -> None:
    """By the server, while the client is still there."""
    end = time.monotonic() + seconds
    while live.server.server_state.connections:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("head", [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_never_comes(live: Live, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.2)
    live.http.close()
    with connected(live) as sock:
        sock.sendall(head)
        wait_closed(live)
        assert sock.recv(1) == b""


def connections(live: Live) -> list[Connection]:
    return [each for each in live.server.server_state.connections if isinstance(each, Connection)]


def look_twice(live: Live) -> None:
    """At all connections, as if their time had come."""
    for each in connections(live):
        for _ in range(2):
            each.loop.call_soon_threadsafe(each._look)


def test_a_client_that_stops_reading(live: Live) -> None:
    """It holds up nobody; then its connection is cut, and its choices are aborted."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(live.address)
        fields = {"logprobs": True, "top_logprobs": 20, "n": 6, "temperature": 100.0, **LONG}
        sock.sendall(request("/v1/chat/completions", {"messages": USER, "stream": True, **fields}))
        live.wait_running(6)
        assert talk(live, request("/v1/completions", {"prompt": "Hi"}))[0] == 200
        end = time.monotonic() + 60
        while connections(live):
            assert time.monotonic() < end
            if any(each.transport.get_write_buffer_size() for each in connections(live)):
                look_twice(live)
            time.sleep(0.02)
    live.wait_idle()
    assert live.metric("taut:request_success_total", finished_reason="abort") == 1


def test_a_slow_model_is_no_slow_client(live: Live) -> None:
    live.says("ab")
    live.pace(0.1)
    with open_stream(live) as stream:
        look_twice(live)
        said = [event["choices"][0]["delta"].get("content", "") for event in stream.read_all()]
    assert "".join(said) == "ab"


def test_a_connection_goes_on_after_errors(calm: Live) -> None:
    sock = http.client.HTTPConnection(*calm.address, timeout=20)
    sock.auto_open = 0  # it can't be opened anew in secret
    sock.connect()
    json_kind = {"Content-Type": "application/json"}
    chat = "/v1/chat/completions"
    wrong: tuple[tuple[str, str, bytes, dict[str, str], int], ...] = (
        ("POST", chat, b"{", json_kind, 400),
        ("POST", chat, b"x" * (9 << 20), json_kind, 413),
        ("POST", chat, b"{}", {"Content-Type": "text/plain"}, 415),
        ("POST", chat, b"\x1f\x8b", {**json_kind, "Content-Encoding": "gzip"}, 415),
        ("GET", "/nothing", b"", {}, 404),
        ("PUT", chat, b"{}", json_kind, 405),
        ("HEAD", chat, b"", {}, 405),
        ("POST", chat, json.dumps({"messages": USER, "model": "x"}).encode(), json_kind, 404),
    )
    for method, path, body, headers, status in wrong:
        sock.request(method, path, body, headers)
        response = sock.getresponse()
        said = response.read()
        assert response.status == status, (method, path, said)
        assert (said == b"") if method == "HEAD" else strict(said.decode())["error"]["message"]
        sock.request("POST", chat, json.dumps({"messages": USER, "max_tokens": 1}), json_kind)
        response = sock.getresponse()
        assert (response.status, bool(response.read())) == (200, True)
    sock.close()


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET /v1/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: two\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n",
    ],
)
def test_what_is_no_http(calm: Live, data: bytes) -> None:
    status, body = talk(calm, data + b"\r\n\r\n")
    assert status == 400
    assert body["error"]["message"] == "Invalid HTTP request received."


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/health", 200),
        ("HEAD", "/v1/models", 200),
        ("HEAD", "/nothing", 404),
        ("OPTIONS", "/v1/models", 405),
        ("OPTIONS", "*", 404),
        ("GET", "//v1/models", 404),
        ("GET", "/v1//models", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/models//", 404),
        ("GET", "/v1/models/%00", 404),
        ("GET", "/v1/models/%ff", 404),
        ("GET", "/%2e%2e/etc/passwd", 404),
        ("GET", "http://other/v1/models", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("TRACE", "/health", 405),
        ("GET", "/v1/models?x=%ff", 200),
    ],
)
def test_odd_paths_and_methods(calm: Live, method: str, path: str, status: int) -> None:
    sock = http.client.HTTPConnection(*calm.address, timeout=20)
    sock.request(method, path)
    response = sock.getresponse()
    body = response.read().decode()
    assert response.status == status
    assert response.headers["x-request-id"]
    assert body == "" if method == "HEAD" else strict(body)
    sock.close()


def test_odd_hosts(calm: Live) -> None:
    for host in (b"[", b"x:y:z", b"\xff"):
        status, body = talk(calm, b"GET /nothing HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert status == 404
        assert body["error"]["message"].startswith("there is no /nothing")


def test_the_first_http(calm: Live) -> None:
    """1.0, whose streams end with their connection."""
    data = request("/v1/completions", {"prompt": "Hi", "stream": True, "max_tokens": 2})
    with connected(calm) as sock:
        sock.sendall(data.replace(b"HTTP/1.1", b"HTTP/1.0"))
        said = b""
        while part := sock.recv(65536):
            said += part
    assert said.endswith(b"data: [DONE]\n\n")


# crowds


def test_fifty_clients_of_one_place(folder: str) -> None:
    with serving(tiny_spec(folder, max_num_seqs=1)) as live:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
        right = live.complete(**fields).json()["choices"][0]["text"]
        said: list[str] = []

        def one() -> None:
            chunks = live.chunks("/v1/completions", **fields)
            said.append("".join(chunk["choices"][0]["text"] for chunk in chunks))

        threads = [threading.Thread(target=one) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert said == [right] * 50


def test_choices_in_a_pool_that_is_too_small(folder: str, calm: Live) -> None:
    fields: dict[str, Any] = {"n": 4, "seed": 3, "temperature": 2.0, "max_tokens": 40}
    fields["ignore_eos"] = True
    right = calm.chat(**fields).json()["choices"]
    with serving(tiny_spec(folder, tokens=112)) as live:
        said = [""] * 4
        for chunk in live.chunks(**fields):
            (choice,) = chunk["choices"]
            said[choice["index"]] += choice["delta"].get("content", "")
            said[choice["index"]] += choice["delta"].get("reasoning", "")
        assert live.engine.stats().scheduler.preemptions > 0
    assert said == [
        choice["message"].get("reasoning", "") + choice["message"]["content"] for choice in right
    ]


def test_ovms_4428_a_client_leaves_a_cache_that_is_full(folder: str) -> None:
    with serving(tiny_spec(folder, tokens=112)) as live:
        live.pace(0.01)
        with open_stream(live, n=4, **LONG) as stream:
            stream.read_chunks(8)
            while live.engine.stats().scheduler.preemptions == 0:
                time.sleep(0.002)
        live.wait_idle(2)
        assert live.chat(max_tokens=1).status_code == 200


# wishes


@pytest.mark.parametrize(
    "fields",
    [
        *({"seed": seed} for seed in (-1, 2**63, 10**30, -(10**30))),
        {"top_k": 10**30},
        {"priority": -(10**30)},
        {"thinking_token_budget": 100_000},
        {"thinking_token_budget": 10**30},
        {"temperature": 1e-300},
        {"temperature": 100},
        {"top_p": 1e-9, "min_p": 1},
        {"repetition_penalty": 1e-9},
        {"stop": ["x" * 100_000, "\N{GRINNING FACE}", "\u0000"]},
        {"n": 80},
        {"messages": [{"role": "user", "content": "\u0000\uffff<think><|im_end|>"}]},
        {"messages": [{"role": "user", "content": []}, {"role": "tool", "content": "x"}]},
    ],
    ids=lambda fields: str(fields)[:40],
)
@pytest.mark.parametrize("stream", [False, True])
def test_the_outermost_that_is_allowed(calm: Live, fields: dict[str, Any], stream: bool) -> None:
    response = calm.chat(**{"max_tokens": 3, "stream": stream, **fields})
    assert response.status_code == 200
    assert '"error"' not in response.text


@pytest.mark.parametrize("place", ["extra_body", "custom_params", "extra_body.custom_params"])
def test_fields_that_stand_where_nobody_reads_them(calm: Live, place: str) -> None:
    """A literal `extra_body`, as clients other than openai-python send it."""
    fields: dict[str, Any] = {"top_k": 5, "other": 1}
    for name in reversed(place.split(".")):
        fields = {name: fields}
    assert error_of(calm.chat(**fields))["param"] == f"{place}.top_k"
    assert calm.chat(extra_body={"top_k": None, "other": 1}, max_tokens=1).status_code == 200


def test_usage_in_every_chunk(calm: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    error = error_of(calm.chat(stream=True, stream_options=options))
    assert error["param"] == "stream_options.continuous_usage_stats"


@pytest.mark.parametrize("stop", ["\\ud800", "\\udfff", "a\\ud83d"])
def test_half_a_character(calm: Live, stop: str) -> None:
    data = f'{{"prompt": "Hi", "stop": "{stop}"}}'.encode()
    kind = {"content-type": "application/json"}
    error_of(calm.http.post("/v1/completions", content=data, headers=kind))


def test_stop_strings_of_several_bytes(live: Live) -> None:
    """One token a byte, so that it begins within a character."""
    live.says("für 5 € und 5 ¢")
    for stop in ("€", " €", "€ u"):
        cut = "für 5 € und 5 ¢".partition(stop)[0]
        assert live.chat(stop=stop).json()["choices"][0]["message"]["content"] == cut
        deltas = [chunk["choices"][0]["delta"] for chunk in live.chunks(stop=stop)]
        assert "".join(delta.get("content", "") for delta in deltas) == cut


def test_logprobs_of_thinking_come_in_both_modes(live: Live) -> None:
    live.says(THOUGHT)
    body = live.chat(logprobs=True, top_logprobs=1).json()
    whole = body["choices"][0]["logprobs"]["content"]
    assert len(whole) == body["usage"]["completion_tokens"]
    parts: list[Any] = []
    for chunk in live.chunks(logprobs=True, top_logprobs=1):
        parts += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert parts == whole


@pytest.mark.parametrize("stream", [False, True])
def test_mlx_331_a_form_begins_behind_the_thinking(live: Live, stream: bool) -> None:
    live.says('<think>Not {"json"!</think>No.')
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    for budget, thinks in ((None, True), (0, False)):
        made = texts(live, stream, response_format=form, thinking_token_budget=budget)
        assert made["reasoning"].startswith("Not {") == thinks
        assert made["content"] in ("true", "false")


def test_vllm_43920_a_good_form_after_a_bad_one(calm: Live) -> None:
    def ask(schema: Any) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return calm.chat(response_format=form, max_tokens=5).status_code

    schemas = ({"type": "boolean"}, {"pattern": "("}, {"type": "nothing"}, {"type": "boolean"})
    assert [ask(schema) for schema in schemas] == [200, 400, 400, 200]


def test_llamacpp_22323_a_second_block_of_thinking(live: Live) -> None:
    live.says("<think>abc</think>x<think>defg</think>y")
    body = live.chat().json()
    assert body["choices"][0]["message"]["content"] == "xy"
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
    body = live.chat(thinking_token_budget=5).json()
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
