"""AsyncEngine: the engine on a thread of its own, for services.

The event loop's side validates and tokenises; the engine's thread takes commands between steps. A
stream can be cancelled at any moment: its request is aborted before the next step, and what still
comes of it is dropped. An exception in the engine's thread ends every stream with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Self

from engine.config import EngineConfig
from engine.engine import Engine, EngineStats, Prompt
from engine.output import Delta, Output
from engine.request import SamplingParams

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """As many requests wait as `max_queued` allows; try again later."""


class EngineDead(RuntimeError):
    """The engine's thread failed or was closed; nothing more will come."""


class Stream:
    """One request's deltas in order; ends after the one that carries its Output."""

    def __init__(self, id: str, cancel: Callable[[str], None]) -> None:
        self.id = id
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
        self._cancel = cancel
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if isinstance(item, BaseException):
            self._over = True
            raise item
        self._over = item.output is not None
        return item

    async def output(self) -> Output:
        """Read to the end."""
        async for delta in self:
            if delta.output is not None:
                return delta.output
        raise RuntimeError(f"the stream {self.id!r} was read to its end or cancelled before")

    def cancel(self) -> None:
        """Abort the request; nothing more comes. No-op after the end."""
        if not self._over:
            self._over = True
            self._cancel(self.id)
            self._queue.put_nowait(asyncio.CancelledError())

    def _put(self, item: Delta | BaseException) -> None:
        """From the engine's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


class AsyncEngine:
    """`async for delta in engine.stream(...)`, or `await (await engine.submit(...)).output()`.

    `max_queued` requests may wait beyond the `max_num_seqs` that run; more are refused with
    QueueFull. Use as `async with AsyncEngine(config) as engine`, or call `close`.
    """

    def __init__(self, config: EngineConfig | str, *, max_queued: int = 256) -> None:
        self.engine = Engine(config)
        self._limit = self.engine.config.max_num_seqs + max_queued
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()  # guards _streams and _closing
        self._closing: str | None = None
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="taut-engine", daemon=True)
        self._thread.start()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> Stream:
        """Take a request. ValueError: it can't be served; QueueFull; EngineDead."""
        self._check_open()
        request = await asyncio.to_thread(
            self.engine.prepare, prompt, params or SamplingParams(), id=id, priority=priority
        )
        stream = Stream(request.id, self._cancel)
        with self._lock:
            self._check_open()
            if request.id in self._streams:
                raise ValueError(f"the request id {request.id!r} is in use by a live request")
            if len(self._streams) >= self._limit:
                raise QueueFull(f"{len(self._streams)} requests are running or waiting")
            self._streams[request.id] = stream
        self._commands.put(lambda: self.engine.submit(request))
        return stream

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[Delta]:
        """Answer one prompt piece by piece; leaving the loop early aborts the request."""
        stream = await self.submit(prompt, params, priority=priority)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Output:
        return await (await self.submit(prompt, params)).output()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def alive(self) -> bool:
        """Whether new requests are taken."""
        return self._closing is None

    async def close(self, *, drain: bool = True) -> None:
        """Take nothing new; finish (or abort) what runs; stop the thread. Safe to call twice."""
        with self._lock:
            self._closing = self._closing or "the engine was closed"
            live = list(self._streams.values())
        if not drain:
            for stream in live:
                stream.cancel()
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineDead(self._closing)

    def _cancel(self, id: str) -> None:
        with self._lock:
            if self._streams.pop(id, None) is not None:
                self._commands.put(lambda: self.engine.abort(id))

    def _serve(self) -> None:
        """The engine's thread: commands, then a step, until closed and drained."""
        try:
            closing = False
            while not closing or self.engine.has_work():
                while not self._commands.empty() or not (closing or self.engine.has_work()):
                    command = self._commands.get()
                    if command is None:
                        closing = True
                    else:
                        command()
                self._deliver(self.engine.step())
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._fail(error)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            with self._lock:
                if delta.output is not None:
                    stream = self._streams.pop(delta.id, None)
                else:
                    stream = self._streams.get(delta.id)
            if stream is not None:
                stream._put(delta)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._closing = f"the engine's thread failed: {error!r}"
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            dead = EngineDead(self._closing)
            dead.__cause__ = error
            stream._put(dead)
