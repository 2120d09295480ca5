"""An OpenAI-compatible server that streams what it is told, with the pauses that it is told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Part = float | bytes
"""Seconds of silence, or bytes of the stream."""

Script = Callable[[dict[str, Any]], list[Part] | tuple[int, bytes]]
"""A body -> the stream, or a status and what comes with it."""


def event(**data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(said: str) -> bytes:
    return event(choices=[{"index": 0, "text": said}], usage=None)


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


@dataclass
class Scripted:
    """What clients asked, and the most of them at once."""

    url: str
    script: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    most: int = 0
    now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def scripted(script: Script, port: int = 0) -> Iterator[Scripted]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer((200, b""))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.bodies.append(body)
                server.paths.append(self.path)
                server.keys.append(self.headers["Authorization"])
                server.now += 1
                server.most = max(server.most, server.now)
            try:
                self._answer(server.script(body))
            finally:
                with server.lock:
                    server.now -= 1

        def _answer(self, told: list[Part] | tuple[int, bytes]) -> None:
            if isinstance(told, tuple):
                self.send_response(told[0])
                self.send_header("Content-Length", str(len(told[1])))
                self.end_headers()
                self.wfile.write(told[1])
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for part in told:
                if isinstance(part, bytes):
                    self.wfile.write(part)
                else:
                    time.sleep(part)
            self.close_connection = True

        def log_message(self, *args: Any) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        request_queue_size = 64

    with Listening(("127.0.0.1", port), Handler) as http:
        server = Scripted(f"http://127.0.0.1:{http.server_port}", script)
        thread = threading.Thread(target=http.serve_forever, args=(0.005,))
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()
