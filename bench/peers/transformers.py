"""Hugging Face Transformers: PyTorch as it comes, one static batch."""

from __future__ import annotations

from bench.peers.peer import PEERS_FOLDER, Configuration, Job, Peer
from bench.peers.worker import WorkerRunner, module_command

PYTHON = PEERS_FOLDER / "transformers" / "bin" / "python"


def _runner(configuration: Configuration, job: Job) -> WorkerRunner:
    return WorkerRunner(module_command(PYTHON, "transformers"), job, configuration.settings)


PEER = Peer(
    name="transformers",
    configurations=tuple(
        Configuration(
            peer="transformers",
            name=name,
            bits=bits,
            files="hf",
            settings={"dtype": dtype},
            default=default,
        )
        for name, bits, dtype, default in (
            ("bf16", 16, "bfloat16", True),
            ("f32", 32, "float32", False),
        )
    ),
    runner=_runner,
)
