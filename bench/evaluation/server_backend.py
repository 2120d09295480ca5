"""Any OpenAI-compatible server as a backend: vLLM, llama.cpp, SGLang, OpenVINO, and Taut's own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import openai

from bench.evaluation.backend import Ask
from bench.evaluation.records import Generation, Usage, failed
from bench.evaluation.server_answer import Encode, generation_from

MAX_RETRIES = 3
"""Of one request, by the client: lost connections, time-outs, 429 and 5xx."""

PROBE_SECONDS = 10.0
"""What the questions before the work may take."""

_STANDARD = ("max_tokens", "temperature", "top_p", "seed")
_EXTRA = ("top_k", "repetition_penalty")

_Item = tuple[Ask, Generation] | BaseException | None


class ServerBackend:
    """`concurrency` requests at a time, each a chat completion that isn't streamed.

    `timeout` is the seconds that one request may be silent, which is all of its generation.
    `tokenizer` names the model (as for the engine) whose vocabulary counts what the server doesn't.
    ValueError: a bad setting, no server there, or one that doesn't serve `model`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        concurrency: int,
        timeout: float,
        tokenizer: str | None = None,
    ) -> None:
        _check(base_url, concurrency, timeout)
        self._url = _without_credentials(base_url)
        self._model = model
        self._concurrency = concurrency
        self._encode = None if tokenizer is None else _load_encode(tokenizer)
        self.chain_rule = _chain_rule(tokenizer)
        self._lock = threading.Lock()
        self._wall_seconds = 0.0
        self._ran_tokens = 0
        self._client = openai.OpenAI(
            base_url=base_url,
            api_key=api_key or "none",  # never the environment's: that key is for another server
            timeout=timeout,
            max_retries=MAX_RETRIES,
        )
        try:
            self._server = self._probe()
        except BaseException:
            self.close()
            raise

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[Ask, Generation]]:
        """Threads pull and send while the caller works on what came, so that the caller's pace
        doesn't count against the server. What is under way when the caller leaves is dropped."""
        crew = _Crew(self, iter(asks))
        threads = [
            threading.Thread(target=crew.work, daemon=True, name=f"ask-{i}")
            for i in range(self._concurrency)
        ]
        for thread in threads:
            thread.start()
        ended = 0
        try:
            while ended < len(threads):
                item = crew.done.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    ended += 1
                else:
                    yield item
        finally:
            crew.left.set()

    def usage(self) -> Usage:
        """The wall clock runs from a run's start to its latest answer."""
        with self._lock:
            tokens = {"main": self._ran_tokens}
            return Usage(wall_seconds=self._wall_seconds, ran_tokens=tokens)

    def environment(self) -> Mapping[str, Any]:
        return {"base_url": self._url, "served_model": self._model, **self._server}

    def close(self) -> None:
        self._client.close()

    def ask(self, ask: Ask) -> Generation:
        """Send one and wait for it. Only a failure of our own raises."""
        params = ask.params
        standard = {
            name: value for name in _STANDARD if (value := getattr(params, name)) is not None
        }
        extra = {name: value for name in _EXTRA if (value := getattr(params, name)) is not None}
        start = time.perf_counter()
        try:
            response = self._client.chat.completions.with_raw_response.create(
                model=self._model,
                messages=ask.messages,  # type: ignore[arg-type]
                extra_body=extra or None,
                **standard,
            )
            seconds = time.perf_counter() - start
            return generation_from(_json(response.text), seconds, self._encode)
        except (openai.APIError, ValueError, RecursionError) as error:
            return failed(_words(error), time.perf_counter() - start)

    def account(self, seconds: float, generation: Generation) -> None:
        with self._lock:
            self._wall_seconds += seconds
            self._ran_tokens += generation.prompt_tokens + generation.output_tokens

    def _probe(self) -> dict[str, str | None]:
        """Refuse a server that isn't there or serves other models; note what it says it is."""
        client = self._client.with_options(max_retries=0, timeout=PROBE_SECONDS)
        try:
            response = client.models.with_raw_response.list()
        except openai.NotFoundError as error:  # small servers have no such list
            server = error.response.headers.get("server")
        except openai.APIError as error:
            raise ValueError(
                f"--base-url {self._url}: no list of models from there: {_words(error)}"
            ) from error
        else:
            self._check_served(response.text)
            server = response.headers.get("server")
        return {"server": server, "server_version": _version(client, self._url)}

    def _check_served(self, text: str) -> None:
        try:
            served = [model["id"] for model in json.loads(text)["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"--base-url {self._url}: /models gives no list of models ({text[:100]!r}); the "
                "URL should be the API's root, such as http://localhost:8000/v1"
            ) from error
        if self._model not in served:
            raise ValueError(
                f"--model {self._model!r} isn't served at --base-url {self._url}; there are "
                f"{', '.join(map(repr, served)) or 'none'}"
            )


class _Crew:
    """What the threads of one run share."""

    def __init__(self, backend: ServerBackend, asks: Iterator[Ask]) -> None:
        self.done: SimpleQueue[_Item] = SimpleQueue()
        self.left = threading.Event()
        self._backend = backend
        self._asks = asks
        self._pulling = threading.Lock()
        self._accounting = threading.Lock()
        self._clock = time.perf_counter()

    def work(self) -> None:
        """One thread's: ask after ask until there are none, or nobody waits for them."""
        try:
            while (ask := self._next()) is not None:
                generation = self._backend.ask(ask)
                self._account(generation)
                self.done.put((ask, generation))
            self.done.put(None)
        except BaseException as error:  # raised where the answers are read
            self.done.put(error)

    def _next(self) -> Ask | None:
        with self._pulling:
            return None if self.left.is_set() else next(self._asks, None)

    def _account(self, generation: Generation) -> None:
        with self._accounting:
            now = time.perf_counter()
            self._backend.account(now - self._clock, generation)
            self._clock = now


def _check(base_url: str, concurrency: int, timeout: float) -> None:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"--base-url is {_without_credentials(base_url)!r}; it should be such as "
            "http://localhost:8000/v1"
        )
    if concurrency < 1:
        raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be above 0 seconds")


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def _load_encode(name: str) -> Encode:
    """The vocabulary alone; the weights are mapped, not read."""
    from engine.build import load_tokenizer  # torch isn't needed for the rest
    from engine.model.checkpoint import open_checkpoint

    try:
        tokenizer = load_tokenizer(open_checkpoint(name))
    except ValueError as error:
        raise ValueError(f"--tokenizer: {error}") from error
    return lambda text: tokenizer.encode(text, add_special=False)


def _chain_rule(tokenizer: str | None) -> str:
    if tokenizer is None:
        counted = "else ESTIMATED as the chain's share of the answer's characters"
    else:
        counted = f"else by encoding the chain's text with the tokenizer of {tokenizer}"
    return (
        "the thinking that the server tells apart or that stands between <think> and </think>; "
        "without any, what stands before the last \\boxed{, all of it if there is none. Tokens: "
        f"the server's reasoning_tokens where it reports them, {counted}"
    )


def _version(client: openai.OpenAI, url: str) -> str | None:
    """What /version beside the API's root says, where there is one."""
    root = url.rstrip("/").removesuffix("/v1")
    try:
        body = client.get(f"{root}/version", cast_to=object)
    except (openai.APIError, ValueError):
        return None
    version = body.get("version") if isinstance(body, dict) else None
    return version if isinstance(version, str) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the server's answer is no JSON: {text[:300]!r}") from error


def _words(error: Exception) -> str:
    """The server's own message where it gave one."""
    if isinstance(error, openai.APIStatusError):
        body = error.body
        message = body.get("message") if isinstance(body, dict) else None
        return f"HTTP {error.status_code}: {message or error.response.text[:500]}"
    if isinstance(error, openai.APIConnectionError) and error.__cause__ is not None:
        return f"{error} ({error.__cause__})"
    return str(error)
