"""A request while it runs: its streams merged, its client watched, its time limited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from collections.abc import Sequence as Seq
from contextlib import aclosing
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from starlette.types import Receive

from engine.output import Delta, Output
from engine.prompt import ContextLengthExceeded
from engine.server.errors import ApiError, refused, too_long
from engine.server.metrics import Stopwatch
from engine.server.openai import Asked
from engine.server.state import RETRY_SECONDS, State
from engine.service import EngineDead, QueueFull, Stream

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Piece(NamedTuple):
    """A delta of the prompt of that number."""

    prompt: int
    delta: Delta


async def start(state: State, asked: Asked, id: str, fields: Seq[str]) -> list[Stream]:
    """One stream a prompt. ApiError: some prompt can't be served, or there is no room."""
    engine, count = state.engine, len(asked.prompts)
    sequences = count * asked.params.n
    if sequences > engine.limit:
        raise ApiError(
            400,
            f"{asked.field}: {count} prompts of n={asked.params.n} choices are more than the "
            f"{engine.limit} sequences that this server takes (--max-num-seqs, --max-queued)",
            param=asked.field if count > 1 else "n",
        )
    try:
        engine.check_room(sequences)  # before the work of reading prompts
        requests = [
            await engine.prepare(
                prompt,
                asked.params,
                id=id if count == 1 else f"{id}-{number}",
                priority=asked.priority,
            )
            for number, prompt in enumerate(asked.prompts)
        ]
        for request in requests:
            _check_length(state, asked, request.choices[0].prompt_len)
        return engine.start(*requests)
    except QueueFull as error:
        raise ApiError(429, str(error), code="queue_full", retry_after=RETRY_SECONDS) from error
    except EngineDead as error:
        raise dead(state) from error
    except ValueError as error:
        raise refused(error, fields, asked.field, asked.form) from error


def _check_length(state: State, asked: Asked, prompt_tokens: int) -> None:
    longest = state.engine.engine.max_model_len
    wanted = asked.params.max_tokens
    if wanted is not None and prompt_tokens + wanted > longest:
        raise too_long(prompt_tokens, wanted, longest, asked.limit)
    limit = state.settings.max_prompt_tokens
    if limit is not None and prompt_tokens > limit:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens; this server takes prompts of at most {limit}"
        )


def dead(state: State) -> ApiError:
    """The engine ended under a request."""
    try:
        state.check_ready()
    except ApiError as error:
        return error
    return ApiError(503, "the engine was closed")


Taken = tuple[int, list[Delta]]
"""Of the prompt of that number; no deltas: its stream has ended."""


async def merged(streams: Seq[Stream], state: State, arrived: float) -> AsyncGenerator[list[Piece]]:
    """All streams' deltas, as many at a time as have come.

    Leaving early cancels what still runs. ApiError: the engine ended.
    """
    watches = [Stopwatch(state.metrics, arrived) for _ in streams]
    left = set(range(len(streams)))
    taken = _one(streams[0]) if len(streams) == 1 else _several(streams)
    try:
        async with aclosing(taken):
            async for number, deltas in taken:
                for delta in deltas:
                    watches[number].see(delta)
                    if delta.output is not None:
                        state.metrics.finished(delta.output, marked=state.served.marked)
                if not deltas or deltas[-1].output is not None:
                    left.discard(number)
                if deltas:
                    yield [Piece(number, delta) for delta in deltas]
    except EngineDead as error:
        raise dead(state) from error
    finally:
        if left:
            state.metrics.aborted()
        for stream in streams:
            stream.cancel()


async def _one(stream: Stream) -> AsyncGenerator[Taken]:
    """The usual case: no task and no queue between the engine's deltas and their reader."""
    while True:
        deltas = await stream.take()
        yield 0, deltas
        if not deltas:
            return


async def _several(streams: Seq[Stream]) -> AsyncGenerator[Taken]:
    queue: asyncio.Queue[Taken | EngineDead] = asyncio.Queue()

    async def pump(number: int, stream: Stream) -> None:
        try:
            while deltas := await stream.take():
                queue.put_nowait((number, deltas))
            queue.put_nowait((number, []))
        except EngineDead as error:
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(*each)) for each in enumerate(streams)]
    running = len(streams)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, EngineDead):
                raise item
            running -= not item[1]
            yield item
    finally:
        for each in pumps:
            each.cancel()


async def collect(streams: Seq[Stream], state: State, arrived: float) -> list[Output]:
    """Every prompt's output, in order."""
    done: dict[int, Output] = {}
    async with aclosing(merged(streams, state, arrived)) as pieces:
        async for some in pieces:
            for piece in some:
                if piece.delta.output is not None:
                    done[piece.prompt] = piece.delta.output
    return [done[number] for number in range(len(streams))]


async def limited(work: Coroutine[Any, Any, T], state: State, arrived: float) -> T:
    """ApiError 504: it took longer than a request may."""
    limit = state.settings.request_timeout
    if not limit:
        return await work
    try:
        async with asyncio.timeout(limit - (perf_counter() - arrived)):
            return await work
    except TimeoutError as error:
        raise ApiError(
            504, f"the request took longer than this server's limit of {limit:g} seconds"
        ) from error


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. ClientGone: the client hung up first, and the work was cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
