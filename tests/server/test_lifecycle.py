"""A server from its start to its end: loading, draining, an engine that dies; the real command."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from engine.config import EngineConfig
from engine.server import serve
from engine.service import AsyncEngine
from tests.server.live import USER, Live, parse_events, serving
from tests.server.sockets import open_stream

LONG = {"max_tokens": 400, "ignore_eos": True}


def test_while_the_model_is_loaded(config: EngineConfig) -> None:
    with serving(config, loading=True) as live:
        for response in (live.http.get("/health"), live.chat(), live.http.get("/v1/models")):
            assert response.status_code == 503
            assert "loaded" in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert live.http.get("/version").status_code == 200
        assert live.http.get("/metrics").status_code == 200
        engine = AsyncEngine(config)
        live._engine = engine
        live.state.serve(engine)
        assert live.http.get("/health").status_code == 200
        assert live.chat(max_tokens=1).status_code == 200
        live.wait_idle()
        engine._commands.put(None)
        engine._thread.join()


def drain(live: Live, number: signal.Signals = signal.SIGTERM) -> None:
    """What a signal does; only a main thread hears real ones."""
    live.server.handle_exit(number, None)


def test_draining_ends_what_runs(config: EngineConfig) -> None:
    with serving(config) as live:
        live.says("x" * 60)
        live.pace(0.01)
        with open_stream(live) as stream:
            stream.read_chunks(2)
            drain(live)
            response = live.chat()
            assert response.status_code == 503
            assert "shutting down" in response.json()["error"]["message"]
            assert live.http.get("/health").status_code == 503
            events = stream.read_all()
            assert events[-1]["choices"][0]["finish_reason"] == "stop"
        assert not live.engine._live


@pytest.mark.parametrize("stream", [False, True])
def test_draining_ends_in_time(config: EngineConfig, stream: bool) -> None:
    """What still runs then is answered by an error, never cut off."""
    with serving(config, drain_timeout=0.2) as live:
        live.pace(0.02)
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(live.chat(stream=stream, **LONG)))
        asking.start()
        live.wait_running()
        begin = time.monotonic()
        drain(live)
        asking.join()
        assert time.monotonic() - begin < 3
        (answer,) = answers
        if stream:
            *_, last, done = parse_events(answer.text)
            assert done.data is None
            error = last.data["error"]
        else:
            assert answer.status_code == 503
            error = answer.json()["error"]
        assert "shutting down" in error["message"]


@pytest.mark.parametrize("patience", [30.0, 0.1])
def test_draining_while_a_prompt_is_read(config: EngineConfig, patience: float) -> None:
    """In several steps: it ends and is answered, or is aborted and told why."""
    with serving(config, drain_timeout=patience) as live:
        live.pace(0.1)
        body = {"prompt": [5] * 400, "max_tokens": 2, "ignore_eos": True, "stream": True}
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(live.post("/v1/completions", body)))
        asking.start()
        live.wait_running()
        drain(live)
        asking.join()
        (answer,) = answers
        *_, last, done = parse_events(answer.text)
        assert done.data is None
        if patience > 1:
            assert last.data["choices"][0]["finish_reason"] == "length"
        else:
            assert "shutting down" in last.data["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(
    config: EngineConfig, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(config) as live:
        monkeypatch.setattr(live.engine.engine, "step", lambda: 1 // 0)
        if stream:
            events = live.events("/v1/chat/completions", {"messages": USER})
            assert events[-1].data is None
            message = events[-2].data["error"]["message"]
        else:
            response = live.chat()
            assert response.status_code == 503
            message = response.json()["error"]["message"]
        assert "failed" in message
        for again in (live.chat(), live.http.get("/health")):
            assert again.status_code == 503
        assert live.http.get("/metrics").status_code == 200


# the command itself


@contextmanager
def command(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.cli", "serve", *args], stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def started(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """The address, and what was said before it."""
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line.strip())
        if line.startswith("ready in"):
            return line.split()[-1].removesuffix("/v1"), lines
    raise AssertionError(lines)


def test_the_command(folder: str) -> None:
    options = ["--port", "0", "--threads", "1", "--served-model-name", "mine"]
    with command(folder, *options, "--max-model-len", "256", "--api-key", "k") as process:
        url, said = started(process)
        text = "\n".join(said)
        assert "256 tokens (--max-model-len)" in text
        assert "full cache" in text
        assert "loop guard on" in text
        assert "1 key" in text
        with httpx.Client(base_url=url, headers={"Authorization": "Bearer k"}) as client:
            body: dict[str, Any] = {"messages": USER, "max_tokens": 3, "model": "mine"}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
            with client.stream(
                "POST", "/v1/chat/completions", json={**body, "stream": True}
            ) as response:
                parts = response.iter_text()
                first = next(parts)
                process.send_signal(signal.SIGTERM)
                events = parse_events(first + "".join(parts))
        assert events[-1].data is None
        assert events[-2].data["choices"][0]["finish_reason"]
        assert process.wait(20) == 0


def test_a_second_signal_ends_at_once(folder: str) -> None:
    with command(folder, "--port", "0", "--threads", "1") as process:
        url, _ = started(process)
        body = {"messages": USER, "ignore_eos": True, "n": 64, "stream": True}
        with (
            httpx.Client(base_url=url, timeout=20) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            next(response.iter_text())
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0


def test_a_signal_while_the_model_is_loaded(folder: str) -> None:
    code = (
        "import sys, time\n"
        "from engine.server import serve\n"
        "serve.AsyncEngine = lambda *args, **options: time.sleep(60)\n"
        "serve.main(sys.argv[1:])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, folder, "--port", "0"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "loading" in process.stderr.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["no-such-model"], "no-such-model"),
        (["--port", "hot"], "--port"),
        (["--kv-policy", "snapkv"], "--kv-budget"),
        (["--max-model-len", "99999"], "max_model_len"),
        (["--config", "nothing.toml"], "nothing.toml"),
    ],
)
def test_a_start_that_fails(folder: str, args: list[str], words: str) -> None:
    """`taut` makes one line and exit code 2 of it."""
    model = [] if args[0] == "no-such-model" else [folder]
    with pytest.raises((ValueError, OSError), match=words):
        serve.main([*model, "--port", "0", *args])


def test_an_address_that_is_taken(live: Live, folder: str) -> None:
    port = str(live.address[1])
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "serve", folder, "--port", port],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"--port {port}" in done.stderr
