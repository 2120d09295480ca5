"""What stands before every route: keys, and the id that answers carry."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence as Seq

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.server.errors import ApiError

OPEN = frozenset(("/health", "/version", "/metrics", "/openapi.json"))
"""Routes that need no key."""


class RequestId:
    """Every answer has an `x-request-id`: the client's own, or a fresh one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        id = given if given.isascii() and 0 < len(given) <= 128 else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = id

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        await self._app(scope, receive, send_named)


class Keys:
    """Refuses requests without one of the keys; how long that takes says nothing of them."""

    def __init__(self, app: ASGIApp, keys: Seq[str]) -> None:
        self._app = app
        self._digests = [_digest(key.strip().encode(errors="surrogateescape")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._known(scope):
            return await self._app(scope, receive, send)
        error = ApiError(
            401,
            "no valid API key: send one as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
        response = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return any(matches) and scheme.lower() == b"bearer"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
