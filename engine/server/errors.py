"""What a client is told that can't be served: OpenAI's error body, the field and the fix."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from engine.prompt import ContextLengthExceeded, IdInUse
from engine.request import GrammarError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_TYPE_NAMES = frozenset(("str", "int", "float", "bool"))
"""By which pydantic tells the types that a field may have."""

_WORD = re.compile(r"\w+")

_ECHO = 80
"""Characters of a client's own input that an error repeats."""


class ApiError(Exception):
    """An answer that is an error. `param` names the request's field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class FieldError(ApiError):
    """400: a field that can't be served; `param` is where it stands: "messages[0].content"."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, f"{param}: {message}", param=param)


def invalid(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body; of a field that may be of several types, what is
    wrong with it as each of them."""
    found = error.errors(include_url=False, include_context=False)
    first = found[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['msg']}", code="invalid_json")
    paths = [_path(each["loc"]) for each in found]
    param = max((path for path in paths if path.startswith(paths[0])), key=len)
    said = dict.fromkeys(
        each["msg"] for each, path in zip(found, paths, strict=True) if path == param
    )
    where = f"{param}: " if param else "the body: "
    last = found[paths.index(param)]
    value = "" if last["type"] == "missing" else f", not {_short(last['input'])}"
    return ApiError(400, where + " or ".join(said) + value, param=param or None)


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role", without the names of types."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _TYPE_NAMES and "[" not in part:
            path += f".{part}" if path else part
    return path


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _ECHO else text[: _ECHO - 3] + "..."


def refused(
    error: ValueError, fields: Collection[str], prompt: str, form: str | None = None
) -> ApiError:
    """What the engine refuses before work starts. Its messages begin with the setting's name;
    `fields` are those of the request, `prompt` the one that holds the prompt, `form` the one that
    gave the answer its grammar."""
    message = str(error)
    if isinstance(error, IdInUse):
        return ApiError(409, message, param="request_id", code="request_id_in_use")
    if isinstance(error, ContextLengthExceeded):
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    if isinstance(error, GrammarError) and form is not None:
        return FieldError(form, message.removeprefix("grammar: "))
    named = _WORD.match(message)
    param = named[0] if named and named[0] in fields else None
    if param is None and any(word in message for word in ("prompt", "chat template")):
        param = prompt
    return ApiError(400, message, param=param)


def too_long(prompt_tokens: int, max_tokens: int, longest: int, param: str) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {longest} tokens; the prompt has {prompt_tokens} "
        f"and {param}={max_tokens} asks for more than the {longest - prompt_tokens} that are left",
        param=param,
        code="context_length_exceeded",
    )


UNAVAILABLE: Mapping[str, str] = {
    "loading": "the model is being loaded; try again soon",
    "draining": "the server is shutting down; try another one",
    "dead": "the engine has failed; see the server's log",
}
"""Why no request is taken, by the server's phase."""
