"""An OpenAI-compatible server that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

MODEL = "tiny/model"


class Reply(NamedTuple):
    status: int
    body: Any  # JSON, or bytes as they are
    headers: dict[str, str] = {}  # noqa: RUF012 - never written to


Script = Callable[[str], Reply | None]
"""A problem's id -> what is answered; None breaks the connection."""


def completion(message: dict[str, Any], finish: str = "stop", **usage: Any) -> Reply:
    usage = {"prompt_tokens": 7, "completion_tokens": 100, **usage}
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return Reply(200, {"object": "chat.completion", "choices": [choice], "usage": usage})


def said(content: str) -> Reply:
    return completion({"content": content})


class Server(ThreadingHTTPServer):
    """`script` answers chats by the last message; `pages` all else."""

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.pages = {"/v1/models": Reply(200, {"data": [{"id": MODEL}, {"id": "other"}]})}
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version = "fake/1"
    sys_version = ""

    def do_GET(self) -> None:
        self._send(self.server.pages.get(self.path, Reply(404, {"detail": "Not Found"})))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.keys.add(self.headers["Authorization"])
        reply = self.server.script(request["messages"][-1]["content"])
        if reply is not None:
            self._send(reply)

    def _send(self, reply: Reply) -> None:
        body = reply.body
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(reply.status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in {**headers, **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass
