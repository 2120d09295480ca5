"""Memory of the host in huge pages: weights and cells are read from all over it, at every step."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros; on the CPU they aren't committed until they are written, and lie in huge pages where
    the system gives them."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize))
    with suppress(AttributeError, OSError):  # another system, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
