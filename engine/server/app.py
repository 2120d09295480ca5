"""The routes: each reads a body, asks, and answers. What they say is made in pure modules."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.server import openai
from engine.server.bodies import read_body
from engine.server.chat import ChatReply
from engine.server.completions import CompletionReply
from engine.server.controls import Offer
from engine.server.errors import ApiError, refused
from engine.server.guard import Keys, RequestId
from engine.server.logprobs import spell
from engine.server.openapi import document
from engine.server.replies import Reply
from engine.server.running import ClientGone, collect, limited, merged, start, while_connected
from engine.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from engine.server.settings import Settings
from engine.server.sse import EventStream, Write, dumps, event
from engine.server.state import State, taut_version
from engine.service import AsyncEngine, Stream


def create_app(settings: Settings, engine: AsyncEngine | None = None) -> Starlette:
    """The server as an ASGI application; its `state.taut` is the `State`.

    Without an engine it answers that the model is being loaded, until `state.taut.serve(engine)`.
    The engine is the caller's to close.
    """
    state = State(settings, int(time.time()))
    if engine is not None:
        state.serve(engine)
    middleware = [Middleware(RequestId)]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if settings.api_key:
        middleware.append(Middleware(Keys, keys=settings.api_key))
    app = Starlette(
        routes=_routes(state),
        middleware=middleware,
        exception_handlers={
            ApiError: partial(_say_error, state),
            HTTPException: partial(_say_http_error, state),
            ClientGone: _say_nothing,
            Exception: partial(_say_internal_error, state),
        },
    )
    app.router.redirect_slashes = False
    app.state.taut = state
    return app


def _routes(state: State) -> list[Route]:
    def route(
        path: str,
        method: str,
        handler: Callable[[State, Request], Awaitable[Response]],
        *,
        ready: bool = True,
    ) -> Route:
        async def endpoint(request: Request) -> Response:
            if ready:
                state.check_ready()
            return await handler(state, request)

        return Route(path, endpoint, methods=[method])

    return [
        route("/v1/chat/completions", "POST", _chat),
        route("/v1/completions", "POST", _complete),
        route("/v1/models", "GET", _models),
        route("/v1/models/{name:path}", "GET", _model),
        route("/tokenize", "POST", _tokenize),
        route("/detokenize", "POST", _detokenize),
        route("/health", "GET", _health),
        route("/version", "GET", _version, ready=False),
        route("/metrics", "GET", _metrics, ready=False),
        route("/openapi.json", "GET", _openapi, ready=False),
    ]


# generation


async def _chat(state: State, request: Request) -> Response:
    data = await read_body(request, state.settings.max_body_bytes)
    body = openai.parse(ChatRequest, data)
    return await _answer(state, request, body, openai.ask_chat, ChatReply, "chatcmpl")


async def _complete(state: State, request: Request) -> Response:
    data = await read_body(request, state.settings.max_body_bytes)
    body = openai.parse(CompletionRequest, data)
    return await _answer(state, request, body, openai.ask_completion, CompletionReply, "cmpl")


async def _answer(
    state: State,
    request: Request,
    body: Any,
    ask: Callable[[Any, Offer], openai.Asked],
    kind: Callable[..., Reply[Any, Any]],
    prefix: str,
) -> Response:
    arrived = perf_counter()
    model = state.model_name(body.model)
    asked = ask(body, state.offer)
    id = f"{prefix}-{asked.request_id or uuid.uuid4().hex}"
    streams = await start(state, asked, id, tuple(type(body).model_fields))
    reply = kind(asked, state.served, id, model)
    if asked.stream:
        work = partial(_stream, state, reply, streams, arrived)
        return EventStream(work, streams, state.settings.ping_interval)
    try:
        outputs = await while_connected(
            request.receive, limited(collect(streams, state, arrived), state, arrived)
        )
    finally:
        for stream in streams:
            stream.cancel()
    return _json(reply.whole(outputs))


async def _stream(
    state: State, reply: Reply[Any, Any], streams: list[Stream], arrived: float, write: Write
) -> None:
    async def run() -> None:
        outputs = {}
        async with aclosing(merged(streams, state, arrived)) as pieces:
            async for some in pieces:
                said = bytearray()
                try:
                    for prompt, delta in some:
                        for chunk in reply.chunks(prompt, delta):
                            said += event(chunk)
                        if delta.output is not None:
                            outputs[prompt] = delta.output
                finally:  # what came before a failure is said
                    if said:
                        await write(bytes(said))
        if reply.asked.usage:
            await write(event(reply.usage_chunk([outputs[n] for n in sorted(outputs)])))

    try:
        await limited(run(), state, arrived)
    except ApiError as error:
        state.metrics.failed(error.status)
        raise


# what is served


async def _models(state: State, request: Request) -> Response:
    return _json({"object": "list", "data": [state.card(name) for name in state.settings.names]})


async def _model(state: State, request: Request) -> Response:
    name = request.path_params["name"]
    if not name:  # which would be the default of a body
        raise HTTPException(404)
    return _json(state.card(state.model_name(name)))


async def _tokenize(state: State, request: Request) -> Response:
    data = await read_body(request, state.settings.max_body_bytes)
    body = openai.parse(TokenizeRequest, data)
    state.model_name(body.model)
    try:
        tokens = await state.tokens(
            openai.text_or_chat(body, state.offer), body.add_special_tokens is not False
        )
    except ValueError as error:
        field = "messages" if body.messages else "prompt"
        raise refused(error, TokenizeRequest.model_fields, field) from error
    made: dict[str, Any] = {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": state.engine.engine.max_model_len,
    }
    if body.return_token_strs:
        made["token_strs"] = [spell(state.served.tokenizer, token).text for token in tokens]
    return _json(made)


async def _detokenize(state: State, request: Request) -> Response:
    data = await read_body(request, state.settings.max_body_bytes)
    body = openai.parse(DetokenizeRequest, data)
    state.model_name(body.model)
    try:
        return _json({"prompt": state.served.tokenizer.decode(body.tokens, skip_special=False)})
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", param="tokens") from error


async def _health(state: State, request: Request) -> Response:
    return _json({"status": "ok"})


async def _version(state: State, request: Request) -> Response:
    return _json({"version": taut_version()})


async def _metrics(state: State, request: Request) -> Response:
    return Response(state.metrics.render(), media_type="text/plain; version=0.0.4")


async def _openapi(state: State, request: Request) -> Response:
    return _json(document(taut_version(), keys=bool(state.settings.api_key)))


def _json(value: Any) -> Response:
    return Response(dumps(value), media_type="application/json")


# errors


async def _say_error(state: State, request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    state.metrics.failed(error.status)
    return JSONResponse(error.body(), error.status, error.headers)


async def _say_http_error(state: State, request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not by this method."""
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is no {request.url.path[:80]}; see /openapi.json",
        405: f"{request.url.path[:80]} isn't asked by {request.method[:20]}",
    }
    said = ApiError(error.status_code, words.get(error.status_code, str(error.detail)))
    response = await _say_error(state, request, said)
    response.headers.update(error.headers or {})
    return response


async def _say_internal_error(state: State, request: Request, error: Exception) -> Response:
    """A bug of ours; the traceback goes to the log, not to the client."""
    return await _say_error(state, request, ApiError(500, "internal error; see the server's log"))


async def _say_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=499)
