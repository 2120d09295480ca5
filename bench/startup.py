"""Seconds from starting a process to its first token, and the most memory it held.

`python -m bench.startup --model smollm2 --runs 5`
Every run is a fresh process. The first may read the model from disk, the later ones find it in the
page cache; all are reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from bench.common import (
    environment,
    fixed_length,
    make_engine,
    peak_rss_bytes,
    spread,
    write_json,
)
from bench.options import add_engine_options, add_output_option

PROMPT = "The capital of France is"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_options(parser)
    add_output_option(parser)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def child(args: argparse.Namespace) -> None:
    """One run: says when its first token is there, on one line."""
    start = time.perf_counter()
    engine = make_engine(args)
    loaded = time.perf_counter()
    (output,) = engine.generate([PROMPT], fixed_length(1))
    assert len(output.token_ids) == 1
    report = {
        "load_seconds": loaded - start,
        "first_token_seconds": time.perf_counter() - loaded,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print("\n" + json.dumps(report), flush=True)
    engine.close()


def measure() -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.startup", "--child", *sys.argv[1:]]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                seconds = time.perf_counter() - start
                return {"seconds": seconds, **json.loads(line)}
    raise SystemExit(f"the engine ended with status {process.returncode} before its first token")


def main() -> None:
    args = arguments()
    if args.child:
        child(args)
        return
    runs = [measure() for _ in range(args.runs)]
    seconds = spread([run["seconds"] for run in runs])
    peak = max(run["peak_rss_bytes"] for run in runs)
    print(
        f"Start to first token: {seconds.median:.2f} s "
        f"({seconds.min:.2f} to {seconds.max:.2f}), peak memory {peak / 2**20:.0f} MiB"
    )
    values = {"seconds": seconds._asdict(), "peak_rss_bytes": peak, "runs": runs}
    write_json(args.output_json, {**values, "arguments": vars(args), "environment": environment()})


if __name__ == "__main__":
    main()
