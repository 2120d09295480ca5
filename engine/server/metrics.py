"""What /metrics says, in Prometheus' words: vLLM's names under `taut:`, and those of reasoning.

Gauges and the engine's own counters are read when they are asked for; what belongs to requests is
counted as they end. Every server has its own registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.output import Delta, Output
from engine.scheduler.controller import Controller
from engine.scheduler.controllers.loop_guard import LoopGuard
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.service import AsyncEngine

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_TOKENS = tuple(2**power for power in range(17))

_CLOSED: Mapping[str, tuple[type[Controller], str]] = {
    "loops": (LoopGuard, "Chains that repeated themselves and were closed."),
    "early_stops": (ThinkingBudget, "Chains that were closed because their budget was spent."),
}
"""Counters that are edits of one controller."""

Families = Iterator[GaugeMetricFamily | CounterMetricFamily]


class Metrics:
    """A server's counters; `render` is the whole page."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"taut:{name}", words, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(
                f"taut:{name}", words, ("model_name",), registry=self._registry, buckets=buckets
            )
            return made.labels(model)

        self._prompt = counter("prompt_tokens", "Tokens of prompts.").labels(model)
        self._cached = counter(
            "prompt_tokens_cached", "Tokens of prompts found in the prefix cache."
        ).labels(model)
        self._generated = counter("generation_tokens", "Generated tokens.").labels(model)
        self._thinking = counter("thinking_tokens", "Generated tokens that were thinking.").labels(
            model
        )
        self._success = counter(
            "request_success", "Finished requests, by how their choices ended.", "finished_reason"
        )
        self._failed = counter("request_errors", "Requests answered by an error.", "status")
        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS
        )
        self.tpot = histogram(
            "time_per_output_token_seconds",
            "Between a request's tokens, on average.",
            _TOKEN_SECONDS,
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Whole requests.", _SECONDS)
        self.queue = histogram("request_queue_time_seconds", "Waiting for a place.", _SECONDS)
        self.prompt_size = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation_size = histogram(
            "request_generation_tokens", "Tokens of a choice.", _TOKENS
        )
        self.thinking_size = histogram(
            "request_thinking_tokens", "Thinking tokens of a choice.", _TOKENS
        )

    def serve(self, engine: AsyncEngine) -> None:
        """From now on the page shows this engine's state too."""
        self._registry.register(_EngineCollector(engine, self._model))

    def finished(self, output: Output, *, marked: bool) -> None:
        self._prompt.inc(len(output.prompt_token_ids))
        self._cached.inc(output.cached_tokens)
        self.prompt_size.observe(len(output.prompt_token_ids))
        for choice in output.choices:
            self._success.labels(self._model, choice.finish_reason).inc()
            self._generated.inc(len(choice.token_ids))
            self.generation_size.observe(len(choice.token_ids))
            if marked:
                self._thinking.inc(choice.thinking_tokens)
                self.thinking_size.observe(choice.thinking_tokens)

    def aborted(self) -> None:
        """A request that its client, or a time limit, ended."""
        self._success.labels(self._model, "abort").inc()

    def failed(self, status: int) -> None:
        self._failed.labels(self._model, str(status)).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class Stopwatch:
    """One prompt's times."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics = metrics
        self._arrived = arrived
        self._first: float | None = None

    def see(self, delta: Delta) -> None:
        now = perf_counter()
        if self._first is None and delta.token_ids:
            self._first = now
            self._metrics.ttft.observe(now - self._arrived)
        if delta.output is not None:
            self._end(delta.output, now)

    def _end(self, output: Output, now: float) -> None:
        self._metrics.e2e.observe(now - self._arrived)
        if output.started is not None:
            self._metrics.queue.observe(max(0.0, output.started - self._arrived))
        longest = max(len(choice.token_ids) for choice in output.choices)
        if self._first is not None and longest > 1:
            self._metrics.tpot.observe((now - self._first) / (longest - 1))


class _EngineCollector(Collector):
    """The engine's own numbers, as they are when somebody asks."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._formats = {
            role: loaded.spec.kv.cells(loaded.dtype).name
            for role, loaded in engine.engine.models.items()
        }

    def describe(self) -> Families:
        return iter(())

    def collect(self) -> Families:
        if not self._engine.alive:
            return
        scheduler = self._engine.stats().scheduler
        yield self._gauge("num_requests_running", "Sequences that run.", scheduler.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", scheduler.waiting)
        preempted = CounterMetricFamily(
            "taut:num_preemptions", "Sequences that gave way.", labels=["model_name"]
        )
        preempted.add_metric([self._model], scheduler.preemptions)
        yield preempted
        yield from self._by_name("ran_tokens", "role", "Tokens run.", scheduler.ran_tokens)
        yield from self._by_name("edits", "controller", "Edits of chains.", scheduler.edits)
        for name, (controller, words) in _CLOSED.items():
            made = CounterMetricFamily(f"taut:{name}", words, labels=["model_name"])
            made.add_metric([self._model], scheduler.edits.get(controller.__name__, 0))
            yield made
        yield from self._cache()

    def _gauge(self, name: str, words: str, value: float) -> GaugeMetricFamily:
        made = GaugeMetricFamily(f"taut:{name}", words, labels=["model_name"])
        made.add_metric([self._model], value)
        return made

    def _by_name(self, name: str, label: str, words: str, values: dict[str, int]) -> Families:
        made = CounterMetricFamily(f"taut:{name}", words, labels=["model_name", label])
        for key, value in values.items():
            made.add_metric([self._model, key], value)
        yield made

    def _cache(self) -> Families:
        labels = ["model_name", "role"]
        usage = GaugeMetricFamily(
            "taut:kv_cache_usage_perc", "Share of the pages in use, 0 to 1.", labels=labels
        )
        held = GaugeMetricFamily(
            "taut:kv_cache_bytes",
            "Bytes in use: cells by their format, side state, and prefixes kept for later.",
            labels=[*labels, "format"],
        )
        evicted = CounterMetricFamily("taut:kv_cells_evicted", "Cells dropped.", labels=labels)
        for role, kv in self._engine.stats().kv.items():
            names = [self._model, role]
            usage.add_metric(names, kv.used_pages / kv.pages)
            held.add_metric([*names, self._formats[role]], kv.used_bytes)
            held.add_metric([*names, "side"], kv.used_side_bytes)
            held.add_metric([*names, "prefix"], kv.prefix_pages * kv.page_bytes)
            evicted.add_metric(names, kv.evicted_cells)
        yield usage
        yield held
        yield evicted
