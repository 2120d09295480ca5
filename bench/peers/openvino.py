"""OpenVINO GenAI, with models that optimum-intel and NNCF made from the same weights.

4-bit ones are symmetric, every matrix at 4 bits but the embedding and the output at 8, as its
exporter has it; "int4-all" has those at 4 bits too. Arithmetic is bfloat16 where the CPU has it,
the KV cache's type is its own choice.
"""

from __future__ import annotations

from bench.peers.peer import PEERS_FOLDER, Configuration, Job, Peer
from bench.peers.worker import WorkerRunner, module_command

PYTHON = PEERS_FOLDER / "openvino" / "bin" / "python"


def _configuration(name: str, bits: int) -> Configuration:
    return Configuration(peer="openvino", name=name, bits=bits, files=f"openvino-{name}")


def _runner(configuration: Configuration, job: Job) -> WorkerRunner:
    return WorkerRunner(module_command(PYTHON, "openvino"), job, configuration.settings)


PEER = Peer(
    name="openvino",
    configurations=(
        _configuration("int4", 4),
        _configuration("int4-all", 4),
        _configuration("int8", 8),
        _configuration("fp16", 16),
    ),
    runner=_runner,
)
