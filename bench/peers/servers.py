"""The HTTP servers that `bench.race_serve` starts: each as its users start it, on the same model.

A slot for every client, no prompt remembered, as many threads for each. llama.cpp's greedy choice
is by the cheapest of its chains, as in `llamacpp.py`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.load import Ask, Load, Target, put
from bench.peers import llamacpp, taut, vllm
from bench.peers.llamacpp import free_port, server_flags
from bench.peers.peer import Configuration, Job, Peer, PeerError, Prompts, Timing
from bench.peers.process import Group, GroupRunner, environment_for

MODEL = "model"
"""What every server calls it."""

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a server is started; its address is added. `fields` go with every request."""

    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)


class ServerRunner(GroupRunner):
    """An OpenAI-compatible server on a loopback port."""

    def __init__(self, command: Command, job: Job) -> None:
        super().__init__(job)
        self._command = command
        self._url = ""
        self.about = {"command": [word for word in command.words if "/" not in word]}

    def start(self) -> None:
        """Until it says that it takes requests."""
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        words = [*self._command.words, "--host", "127.0.0.1", "--port", str(port)]
        env = environment_for(self._job.threads, self._command.env)
        self._group = Group(words, log=self._job.log, env=env)
        deadline = time.monotonic() + self._job.timeout
        with httpx.Client(base_url=self._url, trust_env=False, verify=False) as client:
            while not _ready(client):
                if self._group.ended:
                    raise PeerError(f"it died while loading: {self.last_words()}")
                if time.monotonic() > deadline:
                    raise PeerError(
                        f"it was not ready within {self._job.timeout:g} s: {self.last_words()}"
                    )
                time.sleep(_POLL_SECONDS)

    def load(self, prompts: Prompts, output_tokens: int, clients: int) -> Load:
        """So many clients, each asking again when it was answered. PeerError: one wasn't."""
        target = Target(
            base_url=self._url,
            model=MODEL,
            timeout=self._job.timeout,
            fields={"temperature": 0, "ignore_eos": True, **self._command.fields},
        )
        asks = [Ask(list(prompt), output_tokens) for prompt in prompts]
        load = asyncio.run(put(target, asks, max_concurrency=clients))
        for ask, answer in zip(asks, load.answers, strict=True):
            if answer.error is not None:
                raise PeerError(f"{answer.error}; last it printed: {self.last_words()}")
            sizes = answer.input_tokens, answer.output_tokens
            if sizes != (len(ask.prompt), output_tokens):
                raise PeerError(
                    f"it read {sizes[0]} tokens and made {sizes[1]}, "
                    f"not {len(ask.prompt)} and {output_tokens}"
                )
        return load

    def generate(self, prompts: Prompts, output_tokens: int) -> Timing:
        return Timing(self.load(prompts, output_tokens, len(prompts)).seconds)


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False  # not listening yet


def _taut(configuration: Configuration, job: Job) -> ServerRunner:
    words = [sys.executable, "-m", "engine.cli", "serve", str(job.model)]
    words += ["--served-model-name", MODEL, "--threads", str(job.threads)]
    words += ["--max-num-seqs", str(job.streams), "--max-model-len", str(job.context_tokens + 1)]
    for name, value in configuration.settings.items():
        words += [f"--{name.replace('_', '-')}", value]
    return ServerRunner(Command(words=words), job)


def _llamacpp(configuration: Configuration, job: Job) -> ServerRunner:
    words = [str(llamacpp.SERVER), *server_flags(job)]
    return ServerRunner(Command(words=words, fields={"samplers": ["top_k"], "top_k": 1}), job)


def _vllm(configuration: Configuration, job: Job) -> ServerRunner:
    """In as many processes as it likes: its server has no other way."""
    words = [str(vllm.PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model"]
    words += [str(job.model), "--served-model-name", MODEL]
    words += ["--dtype", configuration.settings["dtype"], "--no-enable-prefix-caching"]
    words += ["--max-model-len", str(job.context_tokens + 1), "--max-num-seqs", str(job.streams)]
    env = vllm.environment(job)
    del env["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return ServerRunner(Command(words=words, env=env), job)


SERVERS: Mapping[str, Peer] = {
    taut.NAME: Peer(name=taut.NAME, configurations=taut.PEER.configurations, runner=_taut),
    "llamacpp": Peer(
        name="llamacpp",
        configurations=tuple(
            each for each in llamacpp.PEER.configurations if each.settings["tool"] == "server"
        ),
        runner=_llamacpp,
    ),
    "vllm": Peer(name="vllm", configurations=vllm.PEER.configurations, runner=_vllm),
}
