"""vLLM's CPU build, offline and in one process.

Its default of several processes was slower on two cores. Where the allocator and the OpenMP library
that its documentation recommends are at hand they are preloaded, as it says to; the record tells.
"""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

from bench.peers.peer import PEERS_FOLDER, Configuration, Job, Peer
from bench.peers.worker import WorkerRunner, module_command

FOLDER = PEERS_FOLDER / "vllm"
PYTHON = FOLDER / "bin" / "python"
_SMALL_TOKENS = 16_384  # cells of so many fit into one GiB of any of our models


def _preloaded() -> list[str]:
    """tcmalloc from the system, Intel's OpenMP from the environment."""
    candidates = (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib64", "/usr/lib")
    names = filter(None, map(ctypes.util.find_library, ("tcmalloc_minimal", "tcmalloc")))
    allocators = [Path(folder) / name for name in names for folder in candidates]
    found = [path for path in allocators if path.exists()][:1]
    found += sorted(FOLDER.glob("lib/python*/site-packages/**/libiomp5.so"))[:1] or sorted(
        FOLDER.glob("lib/libiomp5.so")
    )
    return [str(path) for path in found]


def environment(job: Job) -> dict[str, str]:
    usable = sorted(os.sched_getaffinity(0))[: job.threads]
    small = job.streams * job.context_tokens <= _SMALL_TOKENS
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable)),
        "VLLM_CPU_KVCACHE_SPACE": "1" if small else "4",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if libraries := _preloaded():
        env["LD_PRELOAD"] = ":".join(libraries)
    return env


def _runner(configuration: Configuration, job: Job) -> WorkerRunner:
    command = module_command(PYTHON, "vllm")
    return WorkerRunner(command, job, configuration.settings, environment(job))


PEER = Peer(
    name="vllm",
    configurations=(
        Configuration(
            peer="vllm", name="bf16", bits=16, files="hf", settings={"dtype": "bfloat16"}
        ),
    ),
    runner=_runner,
)
