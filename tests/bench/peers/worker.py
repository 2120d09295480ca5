"""A peer of no engine: does what its job says. Run as a program, as real workers are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from bench.peers.workers.wire import Generate, Job, serve


def load(job: Job) -> tuple[Generate, dict[str, Any]]:
    """`dies`, `hangs`, `refuses`, `short`: at the call of that number, 0 being the load."""
    calls = 0
    print("the engine chats on standard output", flush=True)
    if job.get("child"):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def act() -> None:
        if calls == job.get("hangs"):
            time.sleep(60)
        if calls == job.get("refuses"):
            raise ValueError("no such weights")
        if calls == job.get("dies"):
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(3)

    def generate(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        nonlocal calls
        calls += 1
        act()
        count = output_tokens - (calls == job.get("short"))
        return [[prompt[0] + i for i in range(count)] for prompt in prompts]

    act()
    return generate, {"versions": {"fake": "1"}, "flags": {"streams": job["streams"]}}


if __name__ == "__main__":
    serve(load)
