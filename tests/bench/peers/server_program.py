"""A server that a race starts: `python -m tests.bench.peers.server_program HOW --host H --port P`.

HOW: "good", "dies" (at its 12th request), "short" (a token too few), or "never" (loads for ever).
"""

import itertools
import os
import sys
import time
from typing import Any

from tests.bench.scripted_server import DONE, scripted, text, usage

how, port = sys.argv[1], int(sys.argv[sys.argv.index("--port") + 1])
numbers = itertools.count(1)


def script(body: dict[str, Any]) -> list[float | bytes]:
    assert body["model"] == "model"
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    if next(numbers) >= 12 and how == "dies":
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(3)
    wanted = body["max_tokens"] - (how == "short")
    pieces: list[float | bytes] = [part for _ in range(wanted) for part in (0.001, text("x"))]
    return [*pieces, usage(len(body["prompt"]), wanted), DONE]


if how == "never":
    time.sleep(600)
with scripted(script, port):
    time.sleep(600)
