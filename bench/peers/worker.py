"""A peer behind a worker program: JSON lines to its own Python and back."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.peers.peer import Job, PeerError, Prompts, Timing
from bench.peers.process import Group, GroupRunner, environment_for

_CHUNK = 1 << 16


class WorkerRunner(GroupRunner):
    """`command` starts the worker; `settings` go with the job."""

    def __init__(
        self,
        command: Sequence[str],
        job: Job,
        settings: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(job)
        self._command = command
        self._settings = settings
        self._env = environment_for(job.threads, env)
        self._read = b""

    def start(self) -> None:
        self._group = Group(self._command, log=self._job.log, env=self._env, talks=True)
        job = self._job
        answer = self._ask(
            {
                "model": str(job.model),
                "streams": job.streams,
                "prompt_tokens": job.prompt_tokens,
                "context_tokens": job.context_tokens,
                "threads": job.threads,
                **self._settings,
            },
            "load its model",
        )
        self.about = answer["about"]

    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        call = {"prompts": [list(prompt) for prompt in prompts], "output_tokens": output_tokens}
        answer = self._ask(call, f"run {len(prompts)} prompts to {output_tokens} tokens each")
        return Timing(answer["seconds"], tokens=tuple(answer["tokens"]))

    def _ask(self, message: Mapping[str, Any], what: str) -> dict[str, Any]:
        group = self._running
        with suppress(BrokenPipeError):  # it died: reading says so
            group.stdin.write(json.dumps(message).encode() + b"\n")
            group.stdin.flush()
        line = self._line(group, what)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise PeerError(f"it answered {line[:200]!r} when asked to {what}")
        if "error" in answer:
            raise PeerError(f"it could not {what}: {answer['error']}")
        return answer

    def _line(self, group: Group, what: str) -> bytes:
        deadline = time.monotonic() + self._job.timeout
        handle = group.stdout.fileno()
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([handle], [], [], left)[0]:
                raise PeerError(
                    f"it did not {what} within {self._job.timeout:g} s; last it printed: "
                    f"{self.last_words()}"
                )
            chunk = os.read(handle, _CHUNK)
            if not chunk:
                raise PeerError(_death(group, what))
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        return line


def _death(group: Group, what: str) -> str:
    group.kill()
    status = group.process.returncode
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return (
        f"it died ({how}) when asked to {what}; last it printed: {group.last_words() or 'nothing'}"
    )


def module_command(python: Path | str, module: str) -> list[str]:
    return [str(python), "-m", f"bench.peers.workers.{module}"]
