"""llama.cpp by two of its own tools, since neither alone is both fair and the same for everyone.

`llama-server` gets the very prompts that all engines get and picks tokens greedily, but pays for
HTTP, text and its slots. `llama-batched-bench` has none of these: it feeds random tokens of the
same lengths in lockstep and never samples, so it is llama.cpp's upper bound (to a dense model
random tokens cost what others do). Both are measured wherever both can be, and the better one
counts as llama.cpp's. Only the server can show the time of a fresh process to its first token.

Weights: the packaged file as it is; 16-bit ones from its dequantised values; Q8_0 and Q4_0 from
those. llama.cpp keeps the output matrix of a Q4_0 file at 6 or 8 bits, since that's better for
answers; "q4_0-pure" has it at 4 bits too, which is faster. KV cells are float16 in all of them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.peers.peer import (
    PEERS_FOLDER,
    Configuration,
    Job,
    Peer,
    PeerError,
    Prompts,
    Runner,
    Timing,
)
from bench.peers.process import Group, GroupRunner, environment_for

BINARIES = PEERS_FOLDER / "llamacpp" / "build" / "bin"
SERVER = BINARIES / "llama-server"
BENCH = BINARIES / "llama-batched-bench"
_ROW_TOKENS = 256  # cells are attended to in rows of so many
_POLL_SECONDS = 0.005


def _context_cells(job: Job) -> int:
    """Of one stream, with room for a token more than prompt and output."""
    return -(-(job.context_tokens + 1) // _ROW_TOKENS) * _ROW_TOKENS


def _flags(job: Job) -> list[str]:
    flags = ["--model", str(job.model), "--ctx-size", str(job.streams * _context_cells(job))]
    flags += ["--threads", str(job.threads), "--threads-batch", str(job.threads)]
    return [*flags, "--flash-attn", "on", "--batch-size", "2048", "--ubatch-size", "512"]


def server_flags(job: Job) -> list[str]:
    """A slot a stream, and no prompt remembered."""
    flags = [*_flags(job), "--parallel", str(job.streams), "--no-cache-prompt", "--cache-ram", "0"]
    return [*flags, "--no-ui", "--offline", "--no-warmup"]


def _said(flags: list[str], tool: str) -> dict[str, Any]:
    """For the record: the flags without the model's path."""
    return {"versions": {"llama-cpp-python": _version()}, "flags": [tool, *flags[2:]]}


def _version() -> str:
    """Of the package whose vendored source was built."""
    try:
        return (BINARIES / "VERSION").read_text().strip()
    except OSError:
        raise PeerError("llama.cpp isn't installed: run `make peers PEERS=llamacpp`") from None


class ServerRunner(GroupRunner):
    """llama-server on a loopback port, a slot a stream."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._port = 0

    def start(self) -> None:
        flags = server_flags(self._job)
        self.about = _said(flags, "llama-server")
        self._port = free_port()
        command = [str(SERVER), *flags, "--host", "127.0.0.1", "--port", str(self._port)]
        env = environment_for(self._job.threads)
        self._group = Group(command, log=self._job.log, env=env)
        self._wait(self._group)

    def _wait(self, group: Group) -> None:
        deadline = time.monotonic() + self._job.timeout
        while time.monotonic() < deadline:
            if group.ended:
                raise PeerError(f"it died while loading: {group.last_words()}")
            try:
                status, _ = self._request("GET", "/health")
                if status == http.client.OK:
                    return
            except OSError:
                pass  # not listening yet
            time.sleep(_POLL_SECONDS)
        raise PeerError(f"it was not ready within {self._job.timeout:g} s: {group.last_words()}")

    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        bodies = [json.dumps(_body(prompt, output_tokens)) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            begin = threading.Barrier(len(prompts) + 1)
            asked = [pool.submit(self._complete, body, output_tokens, begin) for body in bodies]
            begin.wait()
            start = time.perf_counter()
            made = [each.result() for each in asked]
            seconds = time.perf_counter() - start
        return Timing(seconds, tokens=tuple(made[0]))

    def _complete(self, body: str, output_tokens: int, begin: threading.Barrier) -> list[int]:
        begin.wait()
        try:
            status, data = self._request("POST", "/completion", body)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"the server broke off ({error!r}): {self.last_words()}") from None
        if status != http.client.OK:
            raise PeerError(f"the server answered {status}: {data[:300].decode(errors='replace')}")
        tokens: list[int] = json.loads(data)["tokens"]
        if len(tokens) != output_tokens:
            raise PeerError(f"it made {len(tokens)} tokens instead of {output_tokens}")
        return tokens

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        timeout = self._job.timeout
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _body(prompt: Any, output_tokens: int) -> dict[str, Any]:
    """Greedy by the cheapest of its chains: the one best token, then nothing to draw from."""
    return {
        "prompt": list(prompt),
        "n_predict": output_tokens,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class BenchRunner(Runner):
    """llama-batched-bench: a process a call, whose own clock starts when the model is loaded."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._peak = 0

    def start(self) -> None:
        self.about = _said(_flags(self._job), "llama-batched-bench")

    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        """An output of n tokens is the prompt and n - 1 steps: the prompt gives the first."""
        size = ["-npp", str(len(prompts[0])), "-ntg", str(max(1, output_tokens - 1))]
        size += ["-npl", str(len(prompts)), "--output-format", "jsonl"]
        rows = self._rows([str(BENCH), *_flags(self._job), *size])
        if len(rows) != 1:
            raise PeerError(f"llama-batched-bench printed {len(rows)} results instead of one")
        (row,) = rows
        if output_tokens == 1:
            return Timing(row["t_pp"])
        return Timing(row["t_pp"] + row["t_tg"], first_seconds=row["t_pp"])

    def _rows(self, command: list[str]) -> list[dict[str, Any]]:
        env = environment_for(self._job.threads)
        group = Group(command, log=self._job.log, env=env, talks=True)
        late = threading.Timer(self._job.timeout, group.signal, [signal.SIGKILL])
        late.start()
        try:
            group.stdin.close()
            printed = group.stdout.read().decode(errors="replace")
        except BaseException:
            group.signal(signal.SIGKILL)
            raise
        finally:
            expired = not late.is_alive()
            late.cancel()
            # wait() doesn't tell a process's own peak
            _, status, usage = os.wait4(group.process.pid, 0)
            group.process.returncode = os.waitstatus_to_exitcode(status)
            group.stdout.close()
        self._peak = max(self._peak, usage.ru_maxrss * 1024)
        if status:
            how = f"within {self._job.timeout:g} s" if expired else f"(wait status {status})"
            raise PeerError(f"llama-batched-bench did not end well {how}: {group.last_words()}")
        return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]

    def pause(self) -> None:
        """Between calls nothing runs."""

    def resume(self) -> None: ...

    def cpu_seconds(self) -> float:
        return 0.0

    def peak_bytes(self) -> int:
        return self._peak

    def close(self) -> None: ...


def _runner(configuration: Configuration, job: Job) -> Runner:
    return BenchRunner(job) if configuration.settings["tool"] == "bench" else ServerRunner(job)


def _both(name: str, bits: int, files: str, *, default: bool = True) -> list[Configuration]:
    return [
        Configuration(
            peer="llamacpp",
            name=name + ("-bench" if tool == "bench" else ""),
            bits=bits,
            files=files,
            settings={"tool": tool},
            default=default,
            starts_cold=tool == "server",
        )
        for tool in ("server", "bench")
    ]


PEER = Peer(
    name="llamacpp",
    configurations=(
        *_both("q4_0", 4, "gguf-q4_0"),
        *_both("q4_0-pure", 4, "gguf-q4_0-pure"),
        *_both("q8_0", 8, "gguf-q8_0"),
        *_both("bf16", 16, "gguf-bf16"),
        *_both("file", 4, "file", default=False),
    ),
    runner=_runner,
)
