"""Reading a request's body: of the right kind, not too long, in time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from engine.server.errors import ApiError
from engine.server.running import ClientGone

_SECONDS = 60.0
"""A client that needs longer to send its body is cut off."""


async def read_body(request: Request, limit: int) -> bytes:
    """ApiError 408, 413 or 415; ClientGone."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0]
    kind = kind.strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"Content-Type must be application/json, not {kind[:80]!r}")
    if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
        raise ApiError(415, f"Content-Encoding {encoding[:80]!r} isn't taken; send plain JSON")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise _too_large(limit)
    data = bytearray()
    try:
        async with asyncio.timeout(_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise ApiError(408, f"the body didn't come within {_SECONDS:g} seconds") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(data)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than this server's {limit} bytes (--max-body-bytes)")
