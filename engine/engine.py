"""Engine: add / step / generate / stream / abort / close. `step()` is the table of contents.

Not safe for several threads at once; `service.AsyncEngine` puts it on a thread of its own.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, Self, cast

import torch

from engine import build
from engine.assembler import Request
from engine.cache.sizes import KVStats
from engine.config import EngineConfig, ModelSpec
from engine.host import usable_cpus
from engine.metrics import MemoryMeter, MemoryTime
from engine.model.tokenizer import Tokenizer
from engine.output import Delta, Output
from engine.progress import progress_bar
from engine.prompt import ContextLengthExceeded, IdInUse, Prompt, read
from engine.request import MAIN, Matcher, Role, SamplingParams, Sequence
from engine.scheduler.controller import Language
from engine.scheduler.controllers.grammar import Grammars
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.scheduler import Scheduler, Settled, Stats
from engine.scheduler.stop import StopRules
from engine.scheduler.thoughts import Thoughts

log = logging.getLogger(__name__)


class EngineStats(NamedTuple):
    """Counters since the start, and what is held now."""

    scheduler: Stats
    kv: dict[Role, KVStats]
    kv_time: dict[Role, MemoryTime]


class Engine:
    """Answers many requests at once with the models of its config.

    `Engine("smollm2")` is short for `Engine(EngineConfig(models={"main": ModelSpec("smollm2")}))`.
    """

    def __init__(self, config: EngineConfig | str) -> None:
        if isinstance(config, str):
            config = EngineConfig(models={MAIN: ModelSpec(config)})
        if not isinstance(config, EngineConfig):
            raise ValueError(f"an Engine takes an EngineConfig or a model's name, not {config!r}")
        self.config = config
        torch.set_num_threads(config.threads or usable_cpus())
        self.models = {
            role: build.load_model(role, spec, config.backends)
            for role, spec in config.models.items()
        }
        build.check_roles(self.models)
        main = self.models[MAIN]
        self.tokenizer: Tokenizer = main.tokenizer
        self.markers = build.markers_for(main.spec.reasoning, self.tokenizer)
        self.max_model_len = build.context_length(config, self.models)
        self._executors = build.build_executors(config, self.models, self.max_model_len)
        # to look at; what changes them is the scheduler's
        self.caches = {role: executor.cache for role, executor in self._executors.items()}
        self._meters = {role: MemoryMeter() for role in self.caches}
        self.grammars = build.grammar_compiler(self.models)
        language = Language(self.markers, self.tokenizer.token_bytes)
        self._scheduler = Scheduler(
            self.caches,
            stop=StopRules(
                eos_ids=main.checkpoint.generation.eos_ids,
                max_model_len=self.max_model_len,
                token_bytes=self._visible_bytes,
                markers=self.markers,
            ),
            controllers=(
                ThinkingBudget(markers=self.markers, token_bytes=self.tokenizer.token_bytes),
                Grammars(markers=self.markers),
                *(each.bind(language) for each in config.controllers),
            ),
            thoughts=Thoughts(self.tokenizer.token_bytes, markers=self.markers),
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
        )
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._random = random.Random(config.seed)
        self._kept: deque[Delta] = deque()  # for `step`
        self._streams: dict[str, deque[Delta]] = {}  # for the `generate` or `stream` of each id

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Take a request; lower `priority` runs first. ValueError says what can't be served."""
        request = self.prepare(prompt, params, id=id, priority=priority)
        self.submit(request)
        return request.id

    def step(self) -> list[Delta]:
        """Run every role with work once: what became final, and a request's Output with its last.

        Deltas of requests that another call ran along (`generate`, `stream`) come first, and what
        belongs to a stream that is still open waits for it.
        """
        self._route(self._step())
        kept, self._kept = self._kept, deque()
        return list(kept)

    def _step(self) -> list[Delta]:
        start = time.perf_counter()
        batches = self._scheduler.schedule()
        held = {role: cache.stats() for role, cache in self.caches.items()}
        for planned in batches:
            executor = self._executors[planned.role]
            batch = self._scheduler.live(planned)
            if not batch.rows:
                continue
            try:
                out = executor.run(batch)
                self._scheduler.commit(batch, out)
                executor.compress(batch)
            except Exception as error:  # the batch's own: the requests beside it go on
                log.exception("a batch of role %s failed", batch.role)
                self._scheduler.fail(batch, f"the model failed: {type(error).__name__}: {error}")
        seconds = time.perf_counter() - start
        for role, stats in held.items():
            self._meters[role].count(stats.used_bytes, stats.used_side_bytes, seconds)
        return [self._publish(settled) for settled in self._scheduler.drain()]

    def abort(self, id: str) -> None:
        """End a request; its last delta comes with the next step. Unknown ids are no error."""
        if id in self._requests:
            self._scheduler.abort(id)

    def has_work(self) -> bool:
        return bool(self._kept) or self._scheduler.has_work()

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Output]:
        """Answer all prompts, in their order; a bad one is refused before any work starts.

        `progress` None: a bar where standard error is a terminal and there is more than one prompt.
        """
        listed = _listed(prompts)
        requests = [
            self.prepare(prompt, each)
            for prompt, each in zip(listed, _spread(params, len(listed)), strict=True)
        ]
        done: dict[str, Output] = {}
        with progress_bar(len(requests), progress) as advance:
            for delta in self._run(requests):
                if delta.output is not None:
                    done[delta.id] = delta.output
                    advance(delta.output)
        return [done[request.id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt piece by piece; closing the iterator aborts the request."""
        return self._run([self.prepare(prompt, params)])

    def _run(self, requests: list[Request]) -> Iterator[Delta]:
        """These requests' deltas to their end; those of others wait for who asked for them."""
        waiting = {request.id for request in requests}
        mine: deque[Delta] = deque()
        try:
            for request in requests:
                self.submit(request)
                self._streams[request.id] = mine
            while waiting:
                if not mine:
                    self._route(self._step())
                while mine:
                    delta = mine.popleft()
                    if delta.output is not None:
                        waiting.discard(delta.id)
                    yield delta
        finally:
            for id in waiting:
                self.abort(id)
            self._route(self._publish(settled) for settled in self._scheduler.drain())
            for request in requests:
                self._streams.pop(request.id, None)

    def _route(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            self._streams.get(delta.id, self._kept).append(delta)

    def stats(self) -> EngineStats:
        return EngineStats(
            self._scheduler.stats(),
            {role: cache.stats() for role, cache in self.caches.items()},
            {role: meter.total for role, meter in self._meters.items()},
        )

    def reset_peaks(self) -> None:
        """From here on the `peak_bytes` of `kv_time` count anew."""
        for meter in self._meters.values():
            meter.reset_peak()

    def check(self) -> None:
        """Every invariant of scheduler and caches; for tests and idle moments."""
        self._scheduler.check()
        for cache in self.caches.values():
            cache.check()

    def close(self) -> None:
        """Abort what runs and give the memory back; nothing can be asked of it any more."""
        for id in list(self._requests):
            self.abort(id)
        # cleared, not replaced: the scheduler shares caches
        for held in (self._executors, self.caches, self._meters, self.models):
            held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Validate and tokenise; everything that can be refused is refused here.

        Touches no running request, so a service may call it from another thread than `step`.
        """
        if not self.models:
            raise RuntimeError("the engine is closed")
        params = SamplingParams() if params is None else params
        if id is None:
            names = (f"request-{count}" for count in self._ids)
            id = next(name for name in names if name not in self._requests)
        _check_call(params, id, priority)
        if id in self._requests:
            raise IdInUse(id)
        tokens, messages = read(prompt, self.tokenizer, self._vocab_size)
        self._check_fits(len(tokens), params.kv_budget)
        check_ids(params, self._vocab_size)
        matcher = self._matcher(params)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        choices = [
            Sequence(
                id,
                len(tokens),
                list(tokens),
                params,
                messages=messages,
                seed=seed,
                priority=priority,
                matcher=matcher and matcher.fork(),
            )
            for _ in range(params.n)
        ]
        return Request(choices, self.tokenizer, self.markers)

    def submit(self, request: Request) -> None:
        """Queue a prepared request. ValueError: its id came into use meanwhile."""
        if request.id in self._requests:
            raise IdInUse(request.id)
        self._scheduler.add(request.choices)
        self._requests[request.id] = request

    def _publish(self, settled: Settled) -> Delta:
        request = self._requests[settled.seq.id]
        delta = request.push(settled)
        if delta.output is not None:
            del self._requests[request.id]
        return delta

    @property
    def _vocab_size(self) -> int:
        return min(m.checkpoint.config.vocab_size for m in self.models.values())

    def tokens(self, prompt: Prompt) -> list[int]:
        """What a prompt is to the model. ValueError: it's none. Safe beside `step`."""
        return list(read(prompt, self.tokenizer, self._vocab_size).tokens)

    def _check_fits(self, tokens: int, kv_budget: int | str | None) -> None:
        if tokens == 0:
            raise ValueError("the prompt is empty: give it at least one token")
        if tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {tokens} tokens; this model's maximum context length is "
                f"{self.max_model_len}, and at least one token must be generated"
            )
        if (reason := self.models[MAIN].spec.kv.refuses(kv_budget)) is not None:
            raise ValueError(reason)
        if (reason := self._scheduler.refuses(tokens, kv_budget)) is not None:
            raise ContextLengthExceeded(reason)

    def _matcher(self, params: SamplingParams) -> Matcher | None:
        """The grammar, compiled: it may take a second, so it is done before the engine's thread."""
        if params.grammar is None:
            return None
        if params.thinking_token_budget is not None and not self.markers.end:
            raise ValueError(
                "thinking_token_budget: this model has no thinking markers, so the phrase that "
                "closes its chain would stand in the answer, where the grammar forbids it"
            )
        return self.grammars.matcher(params.grammar)

    def _visible_bytes(self, token: int) -> bytes:
        return b"" if token in self.tokenizer.special_ids else self.tokenizer.token_bytes(token)


def _check_call(params: object, id: object, priority: object) -> None:
    if not isinstance(params, SamplingParams):
        raise ValueError(f"params must be SamplingParams, not {params!r}")
    if not isinstance(id, str):
        raise ValueError(f"id must be a string, not {id!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority must be an integer (lower runs first), not {priority!r}")


def check_ids(params: SamplingParams, vocab_size: int) -> None:
    """Token ids in `params` are of the vocabulary."""
    for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
        for token in getattr(params, name) or ():
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} has the token id {token!r}; the vocabulary is 0 to {vocab_size - 1}"
                )


def _listed(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or many, as many."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [cast(Prompt, prompts)]  # if it's no prompt, that is said where prompts are read
    listed = list(prompts)
    if listed and isinstance(listed[0], int | float | Mapping):
        return [cast(Prompt, listed)]
    return cast(list[Prompt], listed)


def _spread(
    params: SamplingParams | Seq[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Seq):
        raise ValueError(f"params must be SamplingParams, or one each in a list, not {params!r}")
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} params: give one, or one each")
    return list(params)
