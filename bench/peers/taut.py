"""Taut through the same door as its peers: a process of its own, with this Python."""

from __future__ import annotations

import sys

from bench.peers.peer import Configuration, Job, Peer
from bench.peers.worker import WorkerRunner, module_command

NAME = "taut"


def _runner(configuration: Configuration, job: Job) -> WorkerRunner:
    return WorkerRunner(module_command(sys.executable, "taut"), job, configuration.settings)


def _configuration(name: str, bits: int, *, default: bool = True, **settings: str) -> Configuration:
    return Configuration(
        peer=NAME, name=name, bits=bits, files="file", settings=settings, default=default
    )


PEER = Peer(
    name=NAME,
    configurations=(
        _configuration("bf16", 16, dtype="bfloat16"),
        _configuration("f32", 32, default=False, dtype="float32"),
    ),
    runner=_runner,
)
