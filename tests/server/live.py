"""A real server over a socket, in this process: what a client sees, and what the engine holds."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import openai

from engine.config import EngineConfig
from engine.prompt import Chat, Prompt
from engine.server.app import create_app
from engine.server.serve import Server, listen, uvicorn_config
from engine.server.settings import Settings
from engine.server.state import State
from engine.service import AsyncEngine
from tests.scripted import ScriptedDecoder, letters, saying, script_engine

NAME = "tiny"
USER = [{"role": "user", "content": "Hi"}]


class Event(NamedTuple):
    """One of a stream: its JSON, or None for [DONE]."""

    data: Any


class Live:
    """A server's address, and its insides."""

    def __init__(self, engine: AsyncEngine | None, state: State, url: str, server: Server) -> None:
        self._engine = engine
        self.state = state
        self.url = url
        self.server = server
        self.steps = 0  # of the model, since `pace`
        self.http = httpx.Client(base_url=url, timeout=30)

    @property
    def engine(self) -> AsyncEngine:
        assert self._engine is not None
        return self._engine

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def client(self, key: str = "none", **options: Any) -> Any:
        """An openai.OpenAI; not typed as one, since its overloads know no plain dicts."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30, **options
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": USER, **fields})

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hi", **fields})

    def events(self, path: str, body: Any) -> list[Event]:
        """Every event of a stream, each strictly parsed; comments are left out."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    def chunks(self, path: str = "/v1/chat/completions", **fields: Any) -> list[Any]:
        """The JSON of every event but [DONE], which must be the last."""
        first = {"messages": USER} if "chat" in path else {"prompt": "Hi"}
        *events, done = self.events(path, {**first, **fields})
        assert done.data is None
        return [event.data for event in events]

    # the model

    def tokens(self, prompt: Prompt) -> list[int]:
        return self.engine.engine.tokens(prompt)

    def says(
        self, text: str | bytes, prompt: Prompt | None = None, *, after: str = "<|im_end|>"
    ) -> ScriptedDecoder:
        """From now on the model answers `prompt` (USER, if none) so, then `after` for ever."""
        engine = self.engine.engine
        prompt = Chat(messages=USER) if prompt is None else prompt
        length = len(self.tokens(prompt))
        after_id = engine.tokenizer.token_id(after)
        assert after_id is not None
        return script_engine(engine, saying(length, spelled(self, text), after_id))

    def pace(self, seconds: float) -> None:
        """Every step of the model takes so long."""
        executor = self.engine.engine._executors["main"]
        run = executor.run

        def slow(batch: Any) -> Any:
            self.steps += 1
            time.sleep(seconds)
            return run(batch)

        executor.run = slow  # type: ignore[method-assign]

    def wait_idle(self, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while self.engine._live or self.engine.engine.has_work():
            assert time.monotonic() < end, "requests are still running"
            time.sleep(0.005)

    def running(self) -> int:
        return self.engine.stats().scheduler.running

    def wait_running(self, count: int = 1) -> None:
        end = time.monotonic() + 10
        while self.running() < count:
            assert time.monotonic() < end
            time.sleep(0.002)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            found = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if found and all(f'{k}="{v}"' in (found[1] or "") for k, v in labels.items()):
                total += float(found[2])
        return total


def spelled(live: Live, text: str | bytes) -> list[int]:
    """One token a byte, markers as their own ids."""
    tokenizer = live.engine.engine.tokenizer
    if isinstance(text, bytes):
        return letters(tokenizer, text)
    ids: list[int] = []
    for part in re.split(r"(</?think>)", text):
        marker = tokenizer.token_id(part) if part in ("<think>", "</think>") else None
        ids += letters(tokenizer, part) if marker is None else [marker]
    return ids


def parse_events(text: str) -> list[Event]:
    events = []
    for block in text.split("\n\n"):
        if not block or block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(Event(None if data == "[DONE]" else strict(data)))
    return events


def strict(text: str) -> Any:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=no_constant)


@contextmanager
def serving(
    config: EngineConfig | None, *, max_queued: int = 64, loading: bool = False, **settings: Any
) -> Iterator[Live]:
    """A server that must be idle again at the end. `loading`: without an engine."""
    made = Settings(**{"model": "tiny-model", "served_model_name": (NAME,), "port": 0, **settings})
    engine = None if loading or config is None else AsyncEngine(config, max_queued=max_queued)
    app = create_app(made, engine)
    sock = listen(made)
    host, port = sock.getsockname()[:2]
    ready = threading.Event()
    box: list[Server] = []

    async def run() -> None:
        box.append(Server(uvicorn_config(made, app), app.state.taut))
        ready.set()
        await box[0].serve(sockets=[sock])

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert ready.wait(10)
    live = Live(engine, app.state.taut, f"http://{host}:{port}", box[0])
    wait_port(host, port)
    try:
        yield live
        if engine is not None and engine.alive:
            live.wait_idle()
            stats = engine.stats()
            assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
            assert stats.kv["main"].used_pages == 0
            engine.engine.check()
    finally:
        live.http.close()
        box[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()
        if engine is not None:
            asyncio.run(engine.close(drain=False))


def wait_port(host: str, port: int) -> None:
    end = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)
