"""A load of streamed requests on one OpenAI-compatible server, timed where a client is.

Made on httpx, not the openai package: that one builds a validated object of every chunk, on the
CPUs that the server needs. Tokens are those of the server's own usage: an answer without one counts
as failed, since pieces of text aren't tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import httpx

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

Prompt = str | list[int]
"""Ids are for completions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who is asked, and what stands in every body beside prompt and length."""

    base_url: str
    model: str
    endpoint: str = COMPLETIONS
    api_key: str | None = None
    timeout: float = 600.0  # seconds, for one answer
    fields: Mapping[str, Any] = field(default_factory=dict)

    def body(self, ask: Ask) -> dict[str, Any]:
        chat = self.endpoint == CHAT
        made: dict[str, Any] = {
            "model": self.model,
            "max_completion_tokens" if chat else "max_tokens": ask.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        if chat:
            return {**made, "messages": [{"role": "user", "content": ask.prompt}]}
        return {**made, "prompt": ask.prompt}


class Ask(NamedTuple):
    """One request; `output_tokens` is its limit."""

    prompt: Prompt
    output_tokens: int


class Answer(NamedTuple):
    """Seconds are since the request was sent. Text is answer or thinking; a piece without any
    isn't one. `gaps` lie between pieces, which may hold several tokens."""

    first: float = math.nan
    last: float = math.nan
    gaps: tuple[float, ...] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


class Load(NamedTuple):
    """What came of it, in the order of the asks, and how long all of it took."""

    answers: list[Answer]
    seconds: float


class BadAnswer(Exception):
    """It isn't what OpenAI's API says; the message is for a reader."""


async def put(
    target: Target,
    asks: Sequence[Ask],
    *,
    request_rate: float = math.inf,
    max_concurrency: int | None = None,
    seed: int = 0,
) -> Load:
    """Send them all: so many a second, at random distances (a Poisson process), or at once.

    At most `max_concurrency` are under way; one that has to wait for its turn is timed from then.
    """
    turn = asyncio.Semaphore(max_concurrency or len(asks))
    waits = waits_between(request_rate, len(asks), seed=seed)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=target.base_url, headers=headers, timeout=None, limits=limits
    ) as client:

        async def one(ask: Ask) -> Answer:
            async with turn:
                return await send(client, target, ask)

        begin = perf_counter()
        tasks = []
        for ask, wait in zip(asks, waits, strict=True):
            if wait:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(ask)))
        answers = list(await asyncio.gather(*tasks))
        return Load(answers, perf_counter() - begin)


def waits_between(rate: float, count: int, *, seed: int) -> Iterator[float]:
    """Before each request; none before the first."""
    generator = random.Random(seed)
    for number in range(count):
        yield generator.expovariate(rate) if number and math.isfinite(rate) else 0.0


async def send(client: httpx.AsyncClient, target: Target, ask: Ask) -> Answer:
    """One request; whatever goes wrong is in the answer."""
    watch = _Watch()
    try:
        async with asyncio.timeout(target.timeout):
            async with client.stream("POST", target.endpoint, json=target.body(ask)) as response:
                if response.status_code != httpx.codes.OK:
                    raise BadAnswer(await _refusal(response))
                async for data in _events(response):
                    watch.see(data)
        return watch.answer()
    except TimeoutError:
        return Answer(error=f"no whole answer within {target.timeout:g} s")
    except (httpx.HTTPError, BadAnswer, ValueError) as error:
        return Answer(error=f"{type(error).__name__}: {error}")


async def _refusal(response: httpx.Response) -> str:
    await response.aread()
    return f"status {response.status_code}: {response.text[:300]}"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each up to [DONE], without which the stream was cut."""
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data == line or not data:  # a comment, another field, or the line between two events
            continue
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise BadAnswer("the stream ended without [DONE]")


class _Watch:
    """The times of one answer's pieces."""

    def __init__(self) -> None:
        self._begin = perf_counter()
        self._times: list[float] = []
        self._usage: Mapping[str, Any] | None = None

    def see(self, data: dict[str, Any]) -> None:
        if data.get("error"):
            raise BadAnswer(str(data["error"])[:300])
        self._usage = data.get("usage") or self._usage
        if any(map(_has_text, data.get("choices", ()))):
            self._times.append(perf_counter() - self._begin)

    def answer(self) -> Answer:
        if self._usage is None:
            raise BadAnswer("the server sent no usage, so its tokens can't be counted")
        if not self._times:
            raise BadAnswer("the answer has no text")
        gaps = (b - a for a, b in zip(self._times, self._times[1:], strict=False))
        return Answer(
            self._times[0],
            self._times[-1],
            tuple(gaps),
            int(self._usage["prompt_tokens"]),
            int(self._usage["completion_tokens"]),
        )


def _has_text(choice: Mapping[str, Any]) -> bool:
    said = choice.get("delta") or choice
    return any(said.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))
