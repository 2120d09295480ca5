"""A run step by step: how fast it went as the chains grew, and what compaction took of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine import Engine, Output, SamplingParams
from engine.request import MAIN

PARTS = 8
"""Equal parts of the run's time that tokens a second are given for."""

Clock = Callable[[], float]


class Step(NamedTuple):
    """One step of the engine."""

    seconds: float
    compaction: float  # seconds of it
    tokens: int  # that became final
    streams: int  # sequences that still have a slot after it
    cell_bytes: int
    side_bytes: int
    longest_wait: int  # most steps that a stream which now has a token again had none
    outputs: tuple[Output, ...]  # that it ended


class _Stopwatch:
    """What a cache's compactions take, all calls together."""

    def __init__(self, compress: Callable[..., None], clock: Clock) -> None:
        self._compress = compress
        self._clock = clock
        self.seconds = 0.0

    def __call__(self, slots: Sequence[int], seconds: float | None = None) -> None:
        start = self._clock()
        self._compress(slots, seconds)
        self.seconds += self._clock() - start


def steps_of(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    clock: Clock = time.perf_counter,
) -> Iterator[Step]:
    """Answer all prompts, a step each time that one is asked for."""
    for prompt in prompts:
        engine.add(prompt, params)
    cache, last, count = engine.caches[MAIN], dict[str, int](), 0
    watch = _Stopwatch(cache.compress, clock)
    cache.compress = watch  # type: ignore[method-assign]
    try:
        while engine.has_work():
            before, start = watch.seconds, clock()
            deltas = engine.step()
            seconds = clock() - start
            made = [delta for delta in deltas if delta.token_ids]
            waits = [count - last.get(delta.id, count - 1) - 1 for delta in made]
            last.update((delta.id, count) for delta in made)
            count += 1
            stats = engine.stats()
            yield Step(
                seconds,
                watch.seconds - before,
                sum(len(delta.token_ids) for delta in made),
                stats.scheduler.running,
                stats.kv[MAIN].used_bytes,
                stats.kv[MAIN].used_side_bytes,
                max(waits, default=0),
                tuple(delta.output for delta in deltas if delta.output is not None),
            )
    finally:
        del cache.compress


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
        "wait_longest_steps": max(step.longest_wait for step in steps),
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
