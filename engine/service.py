"""AsyncEngine: the engine on a thread of its own, for services.

The event loop's side validates and tokenises; the engine's thread takes commands between steps. A
stream can be cancelled at any moment: its request is aborted before the next step, and what still
comes of it is dropped. A request is live, its id taken and its place in the queue too, until the
engine has let go of it. An exception in the engine's thread ends every stream with `EngineDead`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from queue import SimpleQueue
from typing import Self

from engine.assembler import Request
from engine.config import EngineConfig
from engine.engine import Engine, EngineStats
from engine.output import Delta, Output
from engine.prompt import IdInUse, Prompt
from engine.request import SamplingParams

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """As many sequences wait as `max_queued` allows; try again later."""


class EngineDead(RuntimeError):
    """The engine's thread failed or was closed; nothing more will come."""


Item = Delta | EngineDead | None
"""What a stream's queue holds; None: it was cancelled."""


class Stream:
    """One request's deltas in order; ends after the one that carries its Output.

    Made by `AsyncEngine.submit`; read it in the event loop that submitted.
    """

    def __init__(self, id: str, choices: int, cancel: Callable[[str], None]) -> None:
        self.id = id
        self.choices = choices
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._cancel = cancel
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """A reader that is cancelled here cancels the request."""
        if self._over:
            raise StopAsyncIteration
        try:
            item = await self._queue.get()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self._over or item is None:  # cancelled by someone else meanwhile
            raise StopAsyncIteration
        if isinstance(item, EngineDead):
            self._over = True
            raise item
        self._over = item.output is not None
        return item

    async def take(self) -> list[Delta]:
        """All that have come, waiting for one; none at the end. For readers to whom a turn of
        their own costs more than a delta. One that is cancelled here cancels the request."""
        if self._over:
            return []
        try:
            items = [await self._queue.get()]
        except asyncio.CancelledError:
            self.cancel()
            raise
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        if self._over:  # cancelled by someone else meanwhile
            return []
        deltas = [item for item in items if isinstance(item, Delta)]
        last = items[-1]
        if isinstance(last, EngineDead):
            if not deltas:
                self._over = True
                raise last
            self._queue.put_nowait(last)
        self._over = bool(deltas) and deltas[-1].output is not None
        return deltas

    async def output(self) -> Output:
        """Read to the end."""
        async for delta in self:
            if delta.output is not None:
                return delta.output
        raise RuntimeError(f"the stream {self.id!r} was read to its end or cancelled before")

    def cancel(self) -> None:
        """Abort the request; nothing more comes, and whoever reads sees the end."""
        if not self._over:
            self._over = True
            self._put(None)
            self._cancel(self.id)

    def _put(self, item: Item) -> None:
        """From any thread."""
        _tell(self._loop, [(self._queue, item)])


def _tell(loop: asyncio.AbstractEventLoop, items: list[tuple[asyncio.Queue[Item], Item]]) -> bool:
    """Into these queues of a loop, from any thread; False where the loop is gone."""

    def put() -> None:
        for queue, item in items:
            queue.put_nowait(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        return False
    return True


class AsyncEngine:
    """`async for delta in engine.stream(...)`, or `await (await engine.submit(...)).output()`.

    `max_queued` sequences (each choice of a request is one) may wait beyond the `max_num_seqs` that
    run; more are refused with QueueFull. Use as `async with AsyncEngine(config) as engine`, or call
    `close`.
    """

    def __init__(self, config: EngineConfig | str, *, max_queued: int = 256) -> None:
        if isinstance(max_queued, bool) or not isinstance(max_queued, int) or max_queued < 0:
            raise ValueError(f"max_queued must be an integer of at least 0, not {max_queued!r}")
        self.engine = Engine(config)
        self.limit = self.engine.config.max_num_seqs + max_queued
        self._live: dict[str, Stream] = {}
        self._closing: str | None = None
        # Guards the two above, and that nothing is commanded for a request that isn't live, nor
        # behind the None that ends the commands.
        self._lock = threading.Lock()
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
        """Take a request; lower `priority` runs first.

        ValueError: it can't be served, or `id` is live (a cancelled request is live until the next
        step). QueueFull. EngineDead.
        """
        return self.start(await self.prepare(prompt, params, id=id, priority=priority))[0]

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Validate and tokenise, on another thread; `start` takes what comes back."""
        self._check_open()
        try:
            return await asyncio.to_thread(
                self.engine.prepare, prompt, params, id=id, priority=priority
            )
        except Exception:
            self._check_open()  # an engine that is closed meanwhile fails in any way
            raise

    def start(self, *requests: Request) -> list[Stream]:
        """Take all of these or none. QueueFull, EngineDead, or IdInUse."""
        streams = [Stream(each.id, len(each.choices), self._cancel) for each in requests]
        with self._lock:
            self._check_open()
            ids: set[str] = set()
            for request in requests:
                if request.id in self._live or request.id in ids:
                    raise IdInUse(request.id)
                ids.add(request.id)
            self._check_room(sum(stream.choices for stream in streams))
            for request, stream in zip(requests, streams, strict=True):
                self._live[request.id] = stream
                self._commands.put(partial(self.engine.submit, request))
        return streams

    def check_room(self, sequences: int = 1) -> None:
        """QueueFull if so many more can't be taken now."""
        with self._lock:
            self._check_room(sequences)

    def _check_room(self, sequences: int) -> None:
        held = sum(stream.choices for stream in self._live.values())
        if held + sequences > self.limit:
            raise QueueFull(f"{held} sequences are running or waiting; try later")

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Delta]:
        """Answer one prompt piece by piece; leaving the loop early aborts the request."""
        stream = await self.submit(prompt, params, id=id, priority=priority)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.cancel()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Output:
        """Answer one prompt whole; cancelling the task aborts the request."""
        return await (await self.submit(prompt, params)).output()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    @property
    def alive(self) -> bool:
        """Whether new requests are taken."""
        return self._closing is None

    async def close(self, *, drain: bool = True) -> None:
        """Take nothing new; finish what runs (or abort it: finish_reason "abort"); stop the thread.

        May be called twice, and after the engine's thread has failed.
        """
        with self._lock:
            self._closing = self._closing or "the engine was closed"
            if not drain:
                for id in self._live:
                    self._command_abort(id)
            self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Drains, unless the block failed."""
        await self.close(drain=kind is None)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise EngineDead(self._closing)

    def _cancel(self, id: str) -> None:
        with self._lock:
            if id in self._live:
                self._command_abort(id)

    def _command_abort(self, id: str) -> None:
        self._commands.put(lambda: self.engine.abort(id))

    def _serve(self) -> None:
        """The engine's thread: commands, then a step, until closed and drained."""
        try:
            while self._take_commands() or self.engine.has_work():
                self._deliver(self.engine.step())
        except BaseException as error:
            log.exception("the engine's thread failed")
            self._fail(error)

    def _take_commands(self) -> bool:
        """All that are there, waiting for one if there is no work; False when None was met."""
        while not self._commands.empty() or not self.engine.has_work():
            command = self._commands.get()
            if command is None:
                self._commands.put(None)
                return False
            command()
        return True

    def _deliver(self, deltas: list[Delta]) -> None:
        """Each event loop is woken once: that takes the interpreter's lock from this thread."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Delta]]] = {}
        with self._lock:
            for delta in deltas:
                stream = self._live[delta.id]
                if delta.output is not None:
                    del self._live[delta.id]
                told.setdefault(stream._loop, []).append((stream, delta))
        for loop, pairs in told.items():
            if not _tell(loop, [(stream._queue, delta) for stream, delta in pairs]):
                for _, delta in pairs:
                    self.engine.abort(delta.id)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._closing = f"the engine's thread failed: {type(error).__name__}: {error}"
            streams, self._live = list(self._live.values()), {}
        for stream in streams:
            dead = EngineDead(self._closing)
            dead.__cause__ = error
            stream._put(dead)
