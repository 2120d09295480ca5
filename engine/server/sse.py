"""Server-sent events: one JSON a `data:` line, comments while nothing happens, `[DONE]` at the end.

A stream that fails says so in a last event; it never just ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from time import perf_counter
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.running import ClientGone, while_connected
from engine.service import Stream

log = logging.getLogger(__name__)

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_LAST_WORDS_SECONDS = 5.0
"""For the last event, if the client doesn't read."""

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: json.dumps makes one a call where it isn't told to do as usual."""

Write = Callable[[bytes], Awaitable[None]]


def dumps(value: Mapping[str, Any]) -> bytes:
    """Strict JSON, in UTF-8."""
    return _ENCODER.encode(value).encode()


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


class EventStream(Response):
    """What `work` writes, as it is written, and a comment after each `ping_interval` seconds of
    silence (0: none). When the client hangs up the work is cancelled, and `streams` in any case."""

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[Write], Awaitable[None]],
        streams: Seq[Stream],
        ping_interval: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._work = work
        self._streams = streams
        self._ping_interval = ping_interval

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._run(send))
        except ClientGone:
            log.debug("a client hung up")
        finally:
            for stream in self._streams:
                stream.cancel()

    async def _run(self, send: Send) -> None:
        written = perf_counter()

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal written
            written = perf_counter()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )

        async def ping() -> None:
            """One sleep an interval, not a timer a token."""
            while True:
                silent = perf_counter() - written
                if silent >= self._ping_interval:
                    await write(PING)
                    silent = 0.0
                await asyncio.sleep(self._ping_interval - silent)

        pinging = asyncio.create_task(ping()) if self._ping_interval else None
        last = DONE
        try:
            await self._work(write)
        except ApiError as error:
            last = event(error.body()) + DONE
        except Exception:
            log.exception("a stream failed")
            last = event(ApiError(500, "internal error; see the server's log").body()) + DONE
        finally:
            if pinging is not None:
                pinging.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await write(last, more=False)
