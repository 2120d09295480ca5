"""The OpenAPI document, generated from the request models and the answers' shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from engine.server import schema, shapes

_REF = "#/components/schemas/{model}"


class _Operation(NamedTuple):
    method: Literal["get", "post"]
    path: str
    summary: str
    request: Any
    answer: Any  # None: plain text, or nothing
    chunk: Any = None
    errors: tuple[int, ...] = ()


_BODY = (400, 401, 408, 413, 415, 503)
_GENERATE = (400, 401, 404, 408, 409, 413, 415, 429, 500, 503, 504)

_OPERATIONS = (
    _Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        schema.ChatRequest,
        shapes.ChatCompletion,
        shapes.ChatChunk,
        _GENERATE,
    ),
    _Operation(
        "post",
        "/v1/completions",
        "Continue prompts",
        schema.CompletionRequest,
        shapes.Completion,
        shapes.CompletionChunk,
        _GENERATE,
    ),
    _Operation("get", "/v1/models", "What is served", None, shapes.ModelList, errors=(401, 503)),
    _Operation(
        "get", "/v1/models/{name}", "One of them", None, shapes.ModelCard, errors=(401, 404, 503)
    ),
    _Operation(
        "post",
        "/tokenize",
        "Text or a conversation as token ids",
        schema.TokenizeRequest,
        shapes.Tokens,
        errors=(*_BODY, 404),
    ),
    _Operation(
        "post",
        "/detokenize",
        "Token ids as text",
        schema.DetokenizeRequest,
        shapes.Text,
        errors=(*_BODY, 404),
    ),
    _Operation("get", "/health", "200 when requests are taken", None, shapes.Health, errors=(503,)),
    _Operation("get", "/version", "The server's version", None, shapes.Version),
    _Operation("get", "/metrics", "Counters in Prometheus' text format", None, None),
)


@lru_cache(maxsize=4)
def document(version: str, *, keys: bool) -> Mapping[str, Any]:
    """The whole document; `keys`: /v1 needs one."""
    models, components = _schemas()
    paths: dict[str, Any] = {}
    for operation in _OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, models, keys)
    security = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Taut", "version": version},
        "paths": paths,
        "components": {"schemas": components, **({"securitySchemes": security} if keys else {})},
    }


def _schemas() -> tuple[dict[Any, Any], dict[str, Any]]:
    """By type: its schema, which refers to the components."""
    kinds: dict[Any, JsonSchemaMode] = {shapes.ErrorBody: "serialization"}
    for operation in _OPERATIONS:
        kinds |= {operation.request: "validation"}
        kinds |= dict.fromkeys((operation.answer, operation.chunk), "serialization")
    kinds.pop(None, None)
    inputs = [(kind, mode, TypeAdapter(kind)) for kind, mode in kinds.items()]
    made, shared = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return {key: value for (key, _), value in made.items()}, shared["$defs"]


def _operation(operation: _Operation, models: dict[Any, Any], keys: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.path.strip("/").replace("/", "_").replace("{name}", "name"),
        "responses": {"200": _answer(operation, models)},
    }
    for status in operation.errors:
        if status != 401 or keys:
            made["responses"][str(status)] = {
                "description": "An error",
                "content": _json(models[shapes.ErrorBody]),
            }
    if operation.request is not None:
        made["requestBody"] = {"required": True, "content": _json(models[operation.request])}
    if "{name}" in operation.path:
        made["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if keys and 401 in operation.errors:
        made["security"] = [{"key": []}]
    return made


def _answer(operation: _Operation, models: dict[Any, Any]) -> dict[str, Any]:
    if operation.answer is None:
        return {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}
    content = _json(models[operation.answer])
    if operation.chunk is None:
        return {"description": "OK", "content": content}
    content["text/event-stream"] = {
        "schema": {
            "type": "string",
            "description": "With stream=true: events whose data are chunks, then [DONE].",
        }
    }
    return {"description": "OK", "content": content, "x-chunk": models[operation.chunk]}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
