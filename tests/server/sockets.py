"""A client of bare sockets, for what a library would hide: hanging up, reading slowly, bad HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.live import USER, Live, strict


class RawStream:
    """A streamed chat whose events are read one by one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._file = sock.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while self._file.readline().strip():
            pass
        self.comments = 0

    def _lines(self) -> Iterator[str]:
        """Of the body, out of its transfer chunks."""
        rest = b""
        while size := int(self._file.readline() or b"0", 16):
            rest += self._file.read(size)
            self._file.readline()
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield line.decode()

    def read(self) -> Iterator[Any]:
        """The JSON of each event, up to [DONE]."""
        for line in self._lines():
            if line.startswith(":"):
                self.comments += 1
            if line == "data: [DONE]":
                return
            if line.startswith("data: "):
                yield strict(line.removeprefix("data: "))

    def read_chunks(self, count: int) -> list[Any]:
        found = []
        for event in self.read():
            found.append(event)
            if len(found) == count:
                break
        return found

    def read_all(self) -> list[Any]:
        return list(self.read())


def request(path: str, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


@contextmanager
def connected(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(live.address, timeout=20) as sock:
        yield sock


@contextmanager
def open_stream(live: Live, **fields: Any) -> Iterator[RawStream]:
    """A streamed chat; hangs up at the end of the block."""
    with connected(live) as sock:
        body = {"messages": USER, "stream": True, **fields}
        sock.sendall(request("/v1/chat/completions", body))
        stream = RawStream(sock)
        yield stream
        stream._file.close()


def talk(live: Live, data: bytes) -> tuple[int, Any]:
    """Sends bytes; the answer's status, and its JSON."""
    with connected(live) as sock:
        sock.sendall(data)
        answer = b""
        while part := sock.recv(65536):
            answer += part
            head, _, body = answer.partition(b"\r\n\r\n")
            if (length := _length(head)) is not None and len(body) >= length:
                break
    status = int(head.split()[1])
    return status, strict(body.decode()) if body.startswith(b"{") else body


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return None
