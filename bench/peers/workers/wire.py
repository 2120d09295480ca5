"""The worker's end of the wire: a JSON object a line in on standard input, one a line out.

First comes the job, answered with {"about": ...} when the model is loaded; then calls
{"prompts": [[id, ...], ...], "output_tokens": n}, answered with {"seconds": s, "tokens": [id, ...]}
(those of the first prompt). {"error": text} answers what failed. End of input ends the worker.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

Job = dict[str, Any]
Generate = Callable[[list[list[int]], int], list[list[int]]]
"""All prompts at once, greedily, exactly so many tokens each -> the tokens."""


def serve(load: Callable[[Job], tuple[Generate, dict[str, Any]]]) -> None:
    """`load` gives what runs prompts, and what is to be said of the engine."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the engine prints goes to the log

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        generate, about = load(json.loads(sys.stdin.readline()))
        answer({"about": about})
        for line in sys.stdin:
            answer(_call(generate, json.loads(line)))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})


def _call(generate: Generate, call: dict[str, Any]) -> dict[str, Any]:
    prompts, wanted = call["prompts"], call["output_tokens"]
    start = time.perf_counter()
    made = generate(prompts, wanted)
    seconds = time.perf_counter() - start
    lengths = sorted({len(tokens) for tokens in made})
    if len(made) != len(prompts) or lengths != [wanted]:
        raise RuntimeError(
            f"{len(prompts)} prompts gave {len(made)} outputs of {lengths} tokens instead of "
            f"{wanted} each"
        )
    return {"seconds": seconds, "tokens": [int(token) for token in made[0]]}


def versions(*packages: str) -> dict[str, str]:
    return {name: metadata.version(name) for name in packages}
