"""What every measurement shares: prompts, repeated runs, memory, and where it was measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import Engine, SamplingParams
from engine.options import ModelOptions, options_of

ROOT = Path(__file__).resolve().parent.parent
PERCENTILES = (10, 25, 50, 75, 90, 99)
_PACKAGES = ["taut", "torch", "numpy", "tokenizers", "safetensors", "gguf"]
_PACKAGES += ["math-verify", "sympy", "reasoning-gym"]  # they decide verdicts


class Spread(NamedTuple):
    """Of a few runs. With so few, the median and the ends say more than a mean."""

    min: float
    median: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    return Spread(min(values), statistics.median(values), max(values))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Linear between neighbours, keyed as in `vllm bench latency`."""
    points = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
    quantiles = torch.tensor(values, dtype=torch.float64).quantile(points)
    return {str(p): q for p, q in zip(PERCENTILES, quantiles.tolist(), strict=True)}


def timed(run: Callable[[], Any]) -> float:
    """Seconds of wall clock."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far; 0 where the system doesn't say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(peaks[0]) * 1024 if peaks else 0


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids drawn evenly: no two prompts share a prefix that a cache could reuse."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def dataset_questions(path: str) -> list[str]:
    """The "question" of each line of a JSONL file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines if line.strip()]
    if not questions:
        raise SystemExit(f"{path} has no questions")
    return questions


def environment() -> dict[str, Any]:
    """Where and on what: belongs into every result."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load": os.getloadavg()[0],
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """With a mark if the tree has changes."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), "")


def write_json(path: str | None, result: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def options_from(args: argparse.Namespace) -> ModelOptions:
    """What the options say of the model; the rest is the engine's own default."""
    said = vars(args)
    names = [option.name for option in options_of(ModelOptions) if option.name in said]
    return ModelOptions(**{name: said[name] for name in names})


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine that the options describe."""
    said, options = vars(args), options_from(args)
    limits = ("max_num_seqs", "max_batched_tokens", "kv_bytes")
    return Engine(options.config(**{n: said[n] for n in limits if said[n] is not None}))


def fixed_length(output_len: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
