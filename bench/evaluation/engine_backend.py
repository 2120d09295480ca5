"""The engine under measurement, in this process: many samples at once, by continuous batching."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from bench.common import peak_rss_bytes
from bench.evaluation import prompts
from bench.evaluation.backend import Ask
from bench.evaluation.kv_watch import KVWatch, Promise
from bench.evaluation.records import Generation, Usage, failed
from engine import Choice, Engine, Output, SamplingParams
from engine.build import SAMPLING_FIELDS, Loaded
from engine.prompt import Prompt
from engine.request import MAIN
from engine.scheduler.reasoning import track_chain


class EngineBackend:
    """Holds as many requests in flight as the engine runs at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wall = self._cpu = 0.0
        self._begin = engine.stats()
        self._promise = Promise(engine.caches[MAIN], engine.models[MAIN].spec.kv)

    @property
    def chain_rule(self) -> str:
        markers = self._engine.markers
        if not markers.end:
            return "no thinking markers: tokens before the last \\boxed{, all if there is none"
        start, end = (self._text(ids) for ids in (markers.start, markers.end))
        return f"tokens between {start} and {end}, all from {start} on if it never closes"

    def _text(self, ids: tuple[int, ...]) -> str:
        return self._engine.tokenizer.decode(ids, skip_special=False)

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[Ask, Generation]]:
        """Each ask with what came of it, in the order in which they finish."""
        source, live = iter(asks), _Live()
        self._engine.reset_peaks()
        while True:
            done = list(self._turn(source, live))
            if not done and not live:
                return
            yield from done

    def _turn(self, source: Iterator[Ask], live: _Live) -> Iterator[tuple[Ask, Generation]]:
        """Fill up, then one step. Its time is counted."""
        wall, cpu = time.perf_counter(), time.process_time()
        while len(live) < self._engine.config.max_num_seqs:
            ask = next(source, None)
            if ask is None:
                break
            try:
                request = self._engine.prepare(self._prompt(ask), _params(ask))
                self._engine.submit(request)
                watch = KVWatch(request.choices[0], self._engine.caches[MAIN], self._promise)
                live[request.id] = _Running(ask, watch, time.perf_counter())
            except ValueError as error:
                yield ask, failed(str(error))
        outputs = [delta.output for delta in self._engine.step() if delta.output] if live else []
        end = time.perf_counter()
        self._wall += end - wall
        self._cpu += time.process_time() - cpu
        done = [(live.pop(output.id), output) for output in outputs]
        for running in live.values():
            running.watch.look()
        for (ask, watch, begin), output in done:
            yield ask, replace(self._generation(output, end - begin), kv=watch.end())

    def _prompt(self, ask: Ask) -> Prompt:
        if self._engine.tokenizer.chat_template is not None:
            return ask.messages
        return prompts.plain(ask.messages)

    def _generation(self, output: Output, seconds: float) -> Generation:
        (choice,) = output.choices
        return Generation(
            text=choice.text,
            thinking=choice.thinking,
            finish_reason=choice.finish_reason,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=len(choice.token_ids),
            thinking_tokens=choice.thinking_tokens,
            answer_tokens=choice.answer_tokens,
            closed=self._closed(output),
            seconds=seconds,
            token_ids=choice.token_ids,
            error=_error(choice),
        )

    def _closed(self, output: Output) -> bool | None:
        """Whether the thinking is over at the end; None for a model without markers."""
        markers = self._engine.markers
        if not markers.end:
            return None
        chain = track_chain(markers, output.prompt_token_ids, self._engine.tokenizer.token_bytes)
        for token in output.token_ids:
            chain.feed(token)
        return not chain.thinking

    def usage(self) -> Usage:
        """Totals since this backend began; the peak is the current `run`'s, and of several roles
        the sum of their own."""
        stats, begin = self._engine.stats(), self._begin
        times = [(stats.kv_time[role], begin.kv_time[role]) for role in stats.kv_time]
        ran = {
            role: tokens - begin.scheduler.ran_tokens.get(role, 0)
            for role, tokens in stats.scheduler.ran_tokens.items()
        }
        return Usage(
            wall_seconds=self._wall,
            cpu_seconds=self._cpu,
            steps=max(now.steps - then.steps for now, then in times),
            kv_byte_steps=sum(now.byte_steps - then.byte_steps for now, then in times),
            kv_byte_seconds=sum(now.byte_seconds - then.byte_seconds for now, then in times),
            kv_side_byte_seconds=sum(
                now.side_byte_seconds - then.side_byte_seconds for now, then in times
            ),
            kv_peak_bytes=sum(now.peak_bytes for now, _ in times),
            preemptions=stats.scheduler.preemptions - begin.scheduler.preemptions,
            ran_tokens=ran,
        )

    def environment(self) -> Mapping[str, Any]:
        models = self._engine.models
        return {
            "backend": "taut",
            "models": {role: model.spec.model for role, model in models.items()},
            "max_model_len": self._engine.max_model_len,
            "sampling_defaults": _defaults(models[MAIN]),
            "peak_rss_bytes": peak_rss_bytes(),
        }

    def close(self) -> None:
        self._engine.close()


class _Running(NamedTuple):
    """A request in flight."""

    ask: Ask
    watch: KVWatch
    begin: float  # when it was submitted


class _Live(dict[str, _Running]):
    """What is in flight, by request id."""


def _error(choice: Choice) -> str | None:
    """Why there is no answer to grade."""
    if choice.finish_reason not in ("error", "abort"):
        return None
    return str(choice.stop_reason or "the request was aborted")


def _params(ask: Ask) -> SamplingParams:
    return SamplingParams(**asdict(ask.params))


def _defaults(model: Loaded) -> dict[str, Any]:
    """What the model's own settings say where the run's say nothing."""
    generation = model.checkpoint.generation
    told = {name: getattr(generation, name) for name in SAMPLING_FIELDS}
    return {name: value for name, value in told.items() if value is not None}
