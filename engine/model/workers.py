"""Threads that load a model side by side, each running torch's operations alone.

torch's own threads meet after every single operation, and its idle ones spin: for many small steps
on a few cores, whole layers side by side are faster and don't disturb each other.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch


def workers() -> ThreadPoolExecutor:
    """As many threads as torch uses."""
    count = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "load", torch.set_num_threads, (1,))
    list(pool.map(lambda barrier: barrier.wait(), [Barrier(count)] * count))  # all have started
    torch.set_num_threads(count)  # it holds for the calling thread and for threads yet to start
    return pool
