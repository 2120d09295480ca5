"""Taut through the same door as its peers: a process of its own, with this Python.

Configurations are number formats of weights (docs/formats.md), and of the activations before them
where it isn't float. Keys and values are bfloat16 cells, as with most peers; "f32" has nothing
rounded.
"""

from __future__ import annotations

import sys

from bench.peers.peer import Configuration, Job, Peer
from bench.peers.worker import WorkerRunner, module_command

NAME = "taut"


def _runner(configuration: Configuration, job: Job) -> WorkerRunner:
    return WorkerRunner(module_command(sys.executable, "taut"), job, configuration.settings)


def _configuration(name: str, bits: int, *, default: bool = True, **settings: str) -> Configuration:
    return Configuration(
        peer=NAME,
        name=name,
        bits=bits,
        files="file",
        settings={"kv_format": "bf16", **settings},
        default=default,
    )


PEER = Peer(
    name=NAME,
    configurations=(
        _configuration("bf16", 16, weights="bf16"),
        _configuration("nvfp4", 4, weights="nvfp4"),
        _configuration("nvfp4-int16", 4, weights="nvfp4", activations="int16"),
        _configuration("nvfp4-int8", 4, weights="nvfp4", activations="int8"),
        _configuration("int8", 8, weights="int8"),
        _configuration("f32", 32, default=False, weights="float", kv_format="fp32"),
    ),
    runner=_runner,
)
