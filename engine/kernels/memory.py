"""Memory of the host in huge pages: weights and cells are read from all over it, at every step."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20
_LINE_BYTES = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros; on the CPU they aren't committed until they are written, and lie in huge pages where
    the system gives them."""
    count = math.prod(shape)
    if count == 0 or (device is not None and device.type != "cpu"):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(_mapped(count * dtype.itemsize), dtype=dtype).view(shape)


def _mapped(nbytes: int) -> mmap.mmap:
    # private: the system may refuse huge pages to shared mappings alone
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # another system, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Arena:
    """Zeros for many who each want less than a huge page: neighbours in one mapping.

    A mapping is given back when all who have a piece of it are gone.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def zeros(self, nbytes: int) -> Tensor:
        """[nbytes] uint8, from a multiple of 64 bytes on."""
        rounded = -(-nbytes // _LINE_BYTES) * _LINE_BYTES
        if rounded > _CHUNK_BYTES // 4:
            return zeros((nbytes,), torch.uint8)
        with self._lock:
            if len(self._left) < rounded:
                self._left = zeros((_CHUNK_BYTES,), torch.uint8)
            piece, self._left = self._left[:nbytes], self._left[rounded:]
        return piece


ARENA = Arena()
"""For whatever is loaded once and kept."""
