"""The header of a GGUF file (versions 2 and 3): metadata and where each tensor lies.

Layout, little-endian: magic, version u32, tensor count u64, metadata count u64; each metadata entry
is a string key, a type u32 and a value; each tensor an entry of name, number of dimensions u32,
dimensions u64 (fastest first), type u32 and offset u64 from the data, which start at the next
multiple of `general.alignment`. A string is its length u64 and UTF-8. The file is mapped and every
read is checked against its end, so a cut or corrupt file gives a ValueError that names it.

The gguf package's own reader makes a numpy array of every string of the vocabulary, which takes
seconds; this one takes a tenth of a second for 150,000 of them.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """Where a tensor's bytes lie in the file; `shape` is slowest first, [out, in] of a matrix."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A mapped file with its metadata as plain Python values and its tensors by name."""

    file: Path
    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads forward through the mapped file and never past its end."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self.file, self.data, self.at = file, data, 0

    def error(self, what: str) -> ValueError:
        return ValueError(f"{self.file}: {what}; the file is truncated or corrupt")

    def bytes(self, count: int, what: str) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise self.error(f"ends at byte {len(self.data)} inside {what}")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def u32(self, what: str) -> int:
        return int.from_bytes(self.bytes(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.bytes(8, what), "little")

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        """Local names and no calls of our own in the loop: vocabularies are long."""
        data, at, end = self.data, self.at, len(self.data)
        found: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + int.from_bytes(data[at:start], "little")
                if at > end or start > end:
                    raise self.error(f"ends at byte {end} inside {what}")
                found.append(data[start:at].decode())
        except UnicodeDecodeError as e:
            raise self.error(f"{what} is not UTF-8") from e
        self.at = at
        return found

    def numbers(self, kind: int, count: int, what: str) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.bytes(count * dtype.itemsize, what), dtype).tolist()

    def value(self, what: str) -> Any:
        kind = self.u32(what)
        if kind != _ARRAY:
            return self.values(kind, 1, what)[0]
        kind = self.u32(what)
        return self.values(kind, self.u64(what), what)

    def values(self, kind: int, count: int, what: str) -> list[Any]:
        if kind == _STRING:
            return self.strings(count, what)
        if kind not in _NUMBERS:
            raise self.error(f"{what} has values of the unknown type {kind}")
        return self.numbers(kind, count, what)


def read_header(file: Path) -> Header:
    """Map the file and read its header; the tensors' bytes are checked to lie inside it."""
    try:
        with file.open("rb") as f:
            # copy on write: torch takes the map as writable memory, and nothing reaches the file
            data = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as e:
        raise ValueError(f"{file}: can't be mapped: {e}") from e
    cursor = _Cursor(file, data)
    _check_version(cursor)
    tensor_count, entry_count = cursor.u64("the header"), cursor.u64("the header")
    metadata: dict[str, Any] = {}
    for _ in range(entry_count):
        key = cursor.string("a metadata key")
        metadata[key] = cursor.value(key)
    raw = [_raw_info(cursor) for _ in range(tensor_count)]
    start = _data_start(cursor, metadata)
    tensors = {info[0]: _place(cursor, start, *info) for info in raw}
    if len(tensors) != len(raw):
        raise cursor.error("two tensors have the same name")
    return Header(file, data, metadata, tensors)


def _check_version(cursor: _Cursor) -> None:
    if cursor.bytes(4, "the header") != b"GGUF":
        raise ValueError(f"{cursor.file}: is no GGUF file (it doesn't start with GGUF)")
    version = cursor.u32("the header")
    if version not in (2, 3):
        order = " (big-endian files are not supported)" if version >> 16 else ""
        raise ValueError(
            f"{cursor.file}: GGUF version {version}{order} is not supported, only 2 and 3"
        )


def _raw_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string("a tensor's name")
    count = cursor.u32(name)
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name} has {count} dimensions")
    shape = tuple(cursor.u64(name) for _ in range(count))[::-1]
    return name, shape, cursor.u32(name), cursor.u64(name)


def _data_start(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {alignment!r}, not a power of two from 8")
    return -(-cursor.at // alignment) * alignment


def _place(
    cursor: _Cursor, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> TensorInfo:
    if kind not in GGML_QUANT_SIZES:
        raise ValueError(f"{cursor.file}: tensor {name} is of the unknown type {kind}")
    known = GGMLQuantizationType(kind)
    block, block_bytes = GGML_QUANT_SIZES[known]
    if shape[-1] % block or offset % 8:
        raise cursor.error(
            f"tensor {name} of type {known.name} and shape {list(shape)} doesn't fill blocks "
            f"of {block}, or starts at an odd offset ({offset})"
        )
    nbytes = math.prod(shape) // block * block_bytes
    if start + offset + nbytes > len(cursor.data):
        raise cursor.error(
            f"tensor {name} ends at byte {start + offset + nbytes}, the file at {len(cursor.data)}"
        )
    return TensorInfo(name, shape, known, start + offset, nbytes)
