"""Requests while they run: clients that leave, full queues, time limits, silence."""

from __future__ import annotations

import threading
import time
from typing import Any

import openai
import pytest

from engine.config import EngineConfig
from tests.scripted import tiny_spec
from tests.server.live import NAME, USER, Live, serving
from tests.server.sockets import connected, open_stream, request, talk

LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(live: Live, stream: bool, n: int) -> None:
    """Within a step or two every choice is gone."""
    live.pace(0.02)
    with connected(live) as sock:
        body = {"messages": USER, "stream": stream, "n": n, **LONG}
        sock.sendall(request("/v1/chat/completions", body))
        live.wait_running(n)
    left = live.steps
    live.wait_idle(2)
    assert live.steps - left <= 3
    assert live.metric("taut:request_success_total", finished_reason="abort") == 1
    assert live.chat(max_tokens=1).status_code == 200


def test_a_client_that_hangs_up_while_it_waits(config: EngineConfig, folder: str) -> None:
    with serving(tiny_spec(folder, max_num_seqs=1)) as live:
        live.pace(0.01)
        with open_stream(live, **LONG) as stream:
            stream.read_chunks(2)
            with connected(live) as sock:
                sock.sendall(request("/v1/chat/completions", {"messages": USER}))
                while live.engine.stats().scheduler.waiting == 0:
                    time.sleep(0.002)
            while live.engine.stats().scheduler.waiting:
                time.sleep(0.002)
            assert stream.read_chunks(1)


def test_every_prompt_of_a_list_is_aborted(live: Live) -> None:
    live.pace(0.01)
    with connected(live) as sock:
        body = {"prompt": ["a", "b", "c"], **LONG}
        sock.sendall(request("/v1/completions", body))
        live.wait_running(3)
    live.wait_idle(2)


def test_openai_python_closes_a_stream(live: Live) -> None:
    live.pace(0.01)
    with live.client() as client:
        stream = client.chat.completions.create(
            model=NAME,
            messages=USER,
            stream=True,
            max_tokens=400,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        stream.close()
    live.wait_idle(2)


def test_a_full_queue(folder: str) -> None:
    with serving(tiny_spec(folder, max_num_seqs=1), max_queued=1) as live:
        live.pace(0.01)
        with open_stream(live, **LONG) as first, open_stream(live, **LONG) as second:
            first.read_chunks(2)
            response = live.chat()
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "queue_full"
            with live.client() as client, pytest.raises(openai.RateLimitError):
                client.chat.completions.create(model=NAME, messages=USER)
            assert live.complete(prompt=["a", "b"]).status_code == 429
            assert second.status == 200
        live.wait_idle()
        assert live.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit(config: EngineConfig, stream: bool) -> None:
    with serving(config, request_timeout=0.3) as live:
        live.pace(0.02)
        begin = time.monotonic()
        if stream:
            events = live.events("/v1/chat/completions", {"messages": USER, **LONG})
            assert events[-1].data is None
            error = events[-2].data["error"]
            assert len(events) > 3
        else:
            response = live.chat(**LONG)
            assert response.status_code == 504
            error = response.json()["error"]
        assert time.monotonic() - begin < 2
        assert "0.3 seconds" in error["message"]
        live.wait_idle(1)
        assert live.chat(max_tokens=1).status_code == 200


def test_comments_while_a_prompt_is_read(config: EngineConfig) -> None:
    """A long prefill: one step that takes its time."""
    with serving(config, ping_interval=0.05) as live:
        live.says("ab")
        live.pace(0.3)
        with open_stream(live) as stream:
            events = stream.read_all()
        assert stream.comments >= 3
        deltas = [event["choices"][0]["delta"].get("content", "") for event in events]
        assert "".join(deltas) == "ab"
        with live.client() as client:
            chunks = list(client.chat.completions.create(model=NAME, messages=USER, stream=True))
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_client_that_does_not_read(config: EngineConfig) -> None:
    """It holds up nobody, and the time limit ends it."""
    with serving(config, request_timeout=1.0) as live, connected(live) as sock:
        body = {"messages": USER, "stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}
        sock.sendall(request("/v1/chat/completions", {**body, **LONG}))
        live.wait_running(8)
        assert live.chat(max_tokens=2).status_code == 200
        live.wait_idle(30)


def test_a_body_that_comes_too_slowly(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.bodies._SECONDS", 0.2)
    status, body = talk(live, request("/v1/completions", {"prompt": "Hi"})[:-5])
    assert status == 408
    assert body["error"]["type"] == "timeout_error"


def test_clients_beside_each_other(live: Live) -> None:
    """Every answer is what it would be alone."""
    prompts = [f"Number {i}" for i in range(12)]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    alone = [live.complete(prompt=prompt, **fields).json()["choices"] for prompt in prompts]
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        if number % 2:
            answers[number] = live.complete(prompt=prompts[number], **fields).json()["choices"]
            return
        chunks = live.chunks("/v1/completions", prompt=prompts[number], **fields)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        answers[number] = [{**alone[number][0], "text": text}]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[number] for number in range(12)] == alone
