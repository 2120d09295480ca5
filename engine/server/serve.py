"""`taut serve`: load the model while the port already answers, serve, drain at SIGTERM.

The first SIGTERM or Ctrl-C stops taking requests and lets those that run end, for `drain_timeout`
seconds; the second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TypeVar, cast

import uvicorn

from engine.config import EngineConfig
from engine.server.app import create_app
from engine.server.banner import Banner
from engine.server.connection import Connection
from engine.server.flags import parse
from engine.server.settings import Settings
from engine.server.state import State
from engine.service import AsyncEngine

log = logging.getLogger(__name__)

T = TypeVar("T")


def main(args: Seq[str]) -> None:
    """Run until told to stop. ValueError, OSError: a flag, the model or the address don't do."""
    settings = parse(args)
    config = settings.engine_config()
    with listen(settings) as sock:
        asyncio.run(serve(settings, config, sock))


def listen(settings: Settings) -> socket.socket:
    """The bound address. OSError says which one is taken."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise OSError(
            f"--host {settings.host} --port {settings.port}: {error.strerror or error}"
        ) from error
    return sock


async def serve(settings: Settings, config: EngineConfig, sock: socket.socket) -> None:
    """Until a signal has come and everything is drained. ValueError: the model can't be loaded."""
    app = create_app(settings)
    state: State = app.state.taut
    server = Server(uvicorn_config(settings, app), state)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    loading = asyncio.create_task(load(settings, config, sock))
    try:
        await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            return await serving  # told to stop before the model was there, or it can't serve
        engine = loading.result()
        state.serve(engine)
        try:
            await serving
        finally:
            await engine.close(drain=False)
    finally:
        loading.cancel()
        server.should_exit = True
        await asyncio.gather(serving, loading, return_exceptions=True)


async def load(settings: Settings, config: EngineConfig, sock: socket.socket) -> AsyncEngine:
    """With what was chosen, and why, on stderr."""
    banner = Banner(sys.stderr)
    begin = time.perf_counter()
    with banner.loading(settings.model):
        engine = await _beside(partial(_made, settings, config))
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = sock.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    banner.ready(settings, engine, time.perf_counter() - begin, f"{scheme}://{host}:{port}")
    return engine


def _made(settings: Settings, config: EngineConfig) -> AsyncEngine:
    engine = AsyncEngine(config, max_queued=settings.max_queued)
    engine.engine.grammars.warm()  # a second that the first schema would hold everybody up for
    return engine


async def _beside(make: Callable[[], T]) -> T:
    """The result, made on a thread that a process which ends doesn't wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        result, failed = None, None
        try:
            result = make()
        except BaseException as error:
            failed = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(tell, result, failed)

    threading.Thread(target=run, name="taut-loading", daemon=True).start()
    return await done


def uvicorn_config(settings: Settings, app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        ws="none",
        lifespan="off",
        log_level="info" if settings.access_log else "warning",
        access_log=settings.access_log,
        server_header=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=5,
    )


class Server(uvicorn.Server):
    """Goes on answering (503 to new requests) until those that run have ended."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state = state
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._state.draining:
            self.should_exit = self.force_exit = True
            return
        self._state.draining = True
        self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        log.warning("shutting down: taking no more requests, ending those that run")
        self._draining = asyncio.create_task(self._state.drain())
        self._draining.add_done_callback(self._drained)

    def _drained(self, task: asyncio.Task[None]) -> None:
        self.should_exit = True
