"""Many clients at once, of whom some leave and some send rubbish, on a cache that is too small.

Every answer that isn't cut short must be the one that the same request got when it was alone; at
the end nothing may be left of any. `python -m tests.server.soak` is the long form.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from engine.request import Sequence as EngineSequence
from engine.service import Stream
from tests.scripted import letters, script_engine, tiny_folder, tiny_spec
from tests.server.live import Live, parse_events, serving, spelled
from tests.server.malformed import CHAT, COMPLETIONS, malformed

MODELS = ("tiny", "scripted")
CLIENTS = 24
DIFFERENT = 40  # requests
CACHE_TOKENS = 192  # for up to 12 sequences of up to 130
CANCELLED, MALFORMED = 0.20, 0.05
_SECONDS = 120.0  # more for one request, and it is stuck


class Ask(NamedTuple):
    path: str
    body: dict[str, Any]


class Tally(NamedTuple):
    """What a soak did; `kinds` by how requests ended."""

    kinds: Counter[str]
    preemptions: int
    grown_bytes: int
    idle_cpus: float


def asks(choose: random.Random, count: int) -> list[Ask]:
    """Different in every way that the API offers, each with one right answer."""
    made = []
    for number in range(count):
        path = choose.choice((CHAT, COMPLETIONS))
        text = " ".join(choose.choices(("a", "the", "cat", "says", "why"), k=choose.randint(1, 9)))
        body: dict[str, Any] = {
            "max_tokens": choose.choice((1, 5, 20, 60)),
            "ignore_eos": choose.random() < 0.5,
            "temperature": choose.choice((0, 1)),
            "seed": number,
            "stream": choose.random() < 0.6,
            "n": choose.choice((1, 1, 1, 2, 3)),
        }
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": text}]
            body["logprobs"] = choose.random() < 0.3
        else:
            body["prompt"] = choose.choice((text, [text, text + " so"]))
        if choose.random() < 0.2:
            body["stop"] = ["e", "zz"]
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        made.append(Ask(path, body))
    return made


def said_of(ask: Ask, response: httpx.Response) -> Any:
    """All that must be the same each time."""
    assert response.status_code == 200, (ask, response.text[:300])
    if not ask.body["stream"]:
        data = response.json()
        return data["choices"], data["usage"]["completion_tokens"]
    *events, done = parse_events(response.text)
    assert done.data is None
    ends: Counter[tuple[int, str]] = Counter()
    joined: dict[tuple[int, str], str] = {}
    usage = 0
    for event in events:
        usage = (event.data["usage"] or {}).get("completion_tokens", usage)
        for choice in event.data["choices"]:
            for name, value in (choice.get("delta") or choice).items():
                if name in ("text", "content", "reasoning") and value:
                    key = (choice["index"], name)
                    joined[key] = joined.get(key, "") + value
            if choice["finish_reason"]:
                ends[choice["index"], choice["finish_reason"]] += 1
    return joined, dict(ends), usage


class Soak:
    """Of one server."""

    def __init__(self, live: Live, seed: int, different: int) -> None:
        self._live = live
        self._choose = random.Random(seed)
        self._asks = asks(self._choose, different)
        self._right: list[Any] = []
        self._seconds: list[float] = []
        self.kinds: Counter[str] = Counter()

    async def alone(self) -> None:
        """What each request is answered when nothing else runs."""
        async with self._client() as client:
            for ask in self._asks:
                begin = time.perf_counter()
                self._right.append(said_of(ask, await client.post(ask.path, json=ask.body)))
                self._seconds.append(time.perf_counter() - begin)

    def _client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self._live.url, timeout=_SECONDS, limits=limits)

    async def storm(self, requests: int) -> None:
        numbers = iter(range(requests))
        async with self._client() as client, asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._ask(client, numbers))

    async def _ask(self, client: httpx.AsyncClient, numbers: Any) -> None:
        for _ in numbers:
            drawn = self._choose.random()
            if drawn < MALFORMED:
                bad = malformed(self._choose)
                answer = await client.post(bad.path, content=bad.data, headers=bad.headers)
                bad.check(answer)
                self.kinds["malformed"] += 1
            elif drawn < MALFORMED + CANCELLED:
                await self._leave(client)
            else:
                await self._stay(client)

    async def _stay(self, client: httpx.AsyncClient) -> None:
        number = self._choose.randrange(len(self._asks))
        ask = self._asks[number]
        begin = time.perf_counter()
        said = said_of(ask, await client.post(ask.path, json=ask.body))
        self._seconds.append(time.perf_counter() - begin)
        assert said == self._right[number], (ask, said, self._right[number])
        self.kinds["answered"] += 1

    async def _leave(self, client: httpx.AsyncClient) -> None:
        """At any time of a request's life: mostly while it waits or runs."""
        ask = self._choose.choice(self._asks)
        patience = self._choose.uniform(0, statistics.median(self._seconds[-50:]))
        try:
            async with asyncio.timeout(patience):
                await client.post(ask.path, json=ask.body)
            self.kinds["too late to leave"] += 1
        except TimeoutError:
            self.kinds["left"] += 1


def soak(folder: str, model: str, requests: int, *, seed: int = 0) -> Tally:
    """AssertionError says what was wrong, or left."""
    config = tiny_spec(folder, tokens=CACHE_TOKENS, max_num_seqs=12)
    before = _left()  # other tests' in this process
    with serving(config, max_queued=10_000) as live:
        if model == "scripted":
            _script(live)
        run = Soak(live, seed, min(DIFFERENT, requests // 5))
        asyncio.run(run.alone())
        asyncio.run(run.storm(requests // 10))  # what grows only once has grown
        live.wait_idle(_SECONDS)
        files, memory = _files(), _memory_bytes()
        asyncio.run(run.storm(requests - requests // 10))
        live.wait_idle(_SECONDS)
        check_empty(live, before)
        _wait_files(files)
        return Tally(
            run.kinds,
            live.engine.stats().scheduler.preemptions,
            _memory_bytes() - memory,
            _idle_cpus(),
        )


def _script(live: Live) -> None:
    """Thinks, answers and ends, over and over; where it is when a prompt ends is chance."""
    tokenizer = live.engine.engine.tokenizer
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    ids = [*spelled(live, "<think>which one</think>the other one."), end]
    ids += [*letters(tokenizer, "\N{CAT FACE} says so"), end]
    script_engine(live.engine.engine, lambda position: ids[position % len(ids)])


def check_empty(live: Live, before: Counter[str]) -> None:
    """Nobody remembers any request, but those held before."""
    engine = live.engine.engine
    engine.check()
    assert not live.engine._live
    assert not engine._requests
    assert all(kv.used_pages == 0 for kv in engine.stats().kv.values())
    deadline = time.monotonic() + 10
    while left := _left() - before:
        assert time.monotonic() < deadline, f"still held: {left}"
        time.sleep(0.05)


def _left() -> Counter[str]:
    gc.collect()
    kinds = (Stream, EngineSequence)
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _wait_files(count: int) -> None:
    """Closed sockets take a moment."""
    deadline = time.monotonic() + 10
    while (now := _files()) > count:
        assert time.monotonic() < deadline, f"{now} open files; there were {count}"
        time.sleep(0.05)


def _memory_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _idle_cpus() -> float:
    """Of this process, server and engine thread included, while nothing is asked."""
    begin, used = time.perf_counter(), time.process_time()
    time.sleep(1)
    return (time.process_time() - used) / (time.perf_counter() - begin)


def check(tally: Tally, requests: int) -> None:
    assert sum(tally.kinds.values()) == requests
    assert tally.kinds["left"] > 0.1 * requests
    assert tally.preemptions > 0.01 * requests, "the cache wasn't too small"
    assert tally.grown_bytes < 24 << 20
    assert tally.idle_cpus < 0.05


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of all models together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        tiny = tiny_folder(Path(folder) / "tiny")
        for model in MODELS:
            requests = args.requests // len(MODELS)
            begin = time.perf_counter()
            tally = soak(tiny, model, requests, seed=args.seed)
            seconds = time.perf_counter() - begin
            print(f"{model}: {seconds:.0f} s, " + json.dumps({**tally._asdict()}), flush=True)
            check(tally, requests)


if __name__ == "__main__":
    main()
