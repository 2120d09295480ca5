"""uvicorn's connection, with less patience and with errors as JSON.

uvicorn waits for ever for a request's head, and for a client to read what is written to it; each
such client would hold a file handle, and its stream the engine.
"""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.server.errors import ApiError
from engine.server.sse import dumps

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0
"""Between two looks at a connection; one that has stood still meanwhile is cut off."""


class Connection(H11Protocol):
    """Cut off when it was the client's turn for `PATIENCE_SECONDS`: to send a whole head, or to
    read so much that more can be written. Bodies have a limit of their own (bodies.py)."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._drained = 0  # how often the client read what had been held back
        self._seen: tuple[object, ...] | None = None
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        self._looking.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        self._drained += 1
        super().resume_writing()

    def _look(self) -> None:
        asking = self.cycle is None or self.cycle.response_complete
        unread = self.transport.get_write_buffer_size() > 0
        seen = (asking, unread, self.cycle, self._drained)
        if seen == self._seen and (asking or unread):
            log.debug("a client stood still")
            self.transport.abort()
        else:
            self._seen = seen
            self._looking = self.loop.call_later(PATIENCE_SECONDS, self._look)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP."""
        body = dumps(ApiError(400, msg).body())
        head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
