"""A run step by step: how fast it went as the chains grew, and what compaction took of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from engine import Engine, Output, SamplingParams

PARTS = 8
"""Equal parts of the run's time that tokens a second are given for."""


class Step(NamedTuple):
    """One step of the engine."""

    seconds: float
    compaction: float  # seconds of it
    tokens: int  # that became final
    streams: int  # sequences that still have a slot after it
    cell_bytes: int
    side_bytes: int


def run_steps(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams
) -> tuple[list[Step], list[Output]]:
    """Answer all prompts; what each step took, and the outputs as they came."""
    for prompt in prompts:
        engine.add(prompt, params)
    steps, outputs = [], []
    compacted = engine.stats().kv["main"].compaction_seconds
    while engine.has_work():
        start = time.perf_counter()
        deltas = engine.step()
        seconds = time.perf_counter() - start
        stats = engine.stats()
        kv = stats.kv["main"]
        made = sum(len(delta.token_ids) for delta in deltas)
        spent, compacted = kv.compaction_seconds - compacted, kv.compaction_seconds
        held = kv.used_bytes, kv.used_side_bytes
        steps.append(Step(seconds, spent, made, stats.scheduler.running, *held))
        outputs += [delta.output for delta in deltas if delta.output is not None]
    return steps, outputs


def summary(steps: Sequence[Step]) -> dict[str, object]:
    """What a run's steps say. The median step leaves compaction out."""
    total = sum(step.seconds for step in steps)
    plain = statistics.median(step.seconds - step.compaction for step in steps)
    longest = max(step.compaction for step in steps)
    return {
        "output_tokens_per_second_over_time": rates(steps, PARTS),
        "kv_bytes_peak": max(step.cell_bytes for step in steps),
        "kv_side_bytes_peak": max(step.side_bytes for step in steps),
        "streams_peak": max(step.streams for step in steps),
        "step_seconds_median": plain,
        "compaction_share": sum(step.compaction for step in steps) / total,
        "compaction_seconds_longest": longest,
        "compaction_longest_in_steps": longest / plain,
    }


def rates(steps: Sequence[Step], parts: int) -> list[float]:
    """Tokens a second in each of so many equal parts of the run's time; a step belongs to the part
    that it ends in."""
    width = sum(step.seconds for step in steps) / parts
    tokens, clock = [0] * parts, 0.0
    for step in steps:
        clock += step.seconds
        tokens[min(int(clock / width), parts - 1)] += step.tokens
    return [count / width for count in tokens]
