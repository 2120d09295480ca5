"""A Hugging Face folder: config.json and safetensors, single or sharded, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.kernels.formats import Nvfp4Parts
from engine.model.hf_config import read_config, read_generation
from engine.model.nvfp4_stored import FLOATS, FOR_ACTIVATIONS, Stored, read_convention
from engine.model.tensors import Shape, check_names, check_shape, needed_shapes


class SafetensorsFolder:
    """A Checkpoint over one folder; tensors are views of the mapped files in their own dtype."""

    metadata = None

    def __init__(self, folder: Path, source: str) -> None:
        self.source = source
        self.path = folder
        self.folder: Path | None = folder
        self.config = read_config(folder)
        self.generation = read_generation(folder)
        self._where = folder
        self._convention = read_convention(folder)
        self.stored_format = None if self._convention is None else "nvfp4"
        self._files: dict[str, tuple[Path, Any]] = {}  # tensor -> its file, and that file opened
        for file, names in _shards(folder).items():
            opened = _open(file)
            held = set(opened.keys())
            if lost := sorted(set(names or ()) - held):
                raise ValueError(f"{file}: tensor {lost[0]} is missing, though the index names it")
            self._files |= dict.fromkeys(held if names is None else names, (file, opened))

    def check(self) -> None:
        """Raise ValueError unless all that `config` asks for is there and fits."""
        needed = needed_shapes(self._where, self.config, len(self._files))
        wanted: dict[str, Stored] = {}
        for name, shape in needed.items():
            wanted |= self._packed(name, shape) or {name: Stored(shape, FLOATS)}
        shapes = {name: stored.shape for name, stored in wanted.items()}
        check_names(self._where, filter(self._counts, self._files), shapes)
        for name, stored in wanted.items():
            self._check(name, stored)

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """The tensor, without a copy, after a check of its shape."""
        return self._check(name, Stored(shape, FLOATS))

    def packed(self, name: str, shape: Shape) -> Nvfp4Parts | None:
        """The matrix as it is stored, if that is in NVFP4; its codes aren't copied."""
        parts = self._packed(name, shape)
        if self._convention is None or not parts:
            return None
        tensors = [self._check(part, stored) for part, stored in parts.items()]
        return self._convention.read(self._where, name, *tensors)

    def rows(self, name: str, shape: Shape) -> Callable[[Tensor], Tensor]:
        """ids [n] -> the tensor's rows [n, E], read from the mapped file."""
        table = self.tensor(name, shape)
        return lambda ids: table.index_select(0, ids)

    def _packed(self, name: str, shape: Shape) -> dict[str, Stored]:
        """The tensors that stand for a matrix in NVFP4; none where it's stored as floats."""
        if self._convention is None or len(shape) != 2:
            return {}
        parts = self._convention.parts(name, shape)
        return parts if any(part in self._files for part in parts if part != name) else {}

    def _counts(self, name: str) -> bool:
        """Old checkpoints hold rotary tables, and tied ones a second copy of the embedding."""
        tied = self.config.tied_embeddings and name == "lm_head.weight"
        unused = self._convention is not None and name.endswith(FOR_ACTIVATIONS)
        return not tied and not unused and not name.endswith("rotary_emb.inv_freq")

    def _check(self, name: str, stored: Stored) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self._where}: tensor {name} is missing; is the download complete?")
        file, opened = self._files[name]
        part = opened.get_slice(name)
        if part.get_dtype() not in stored.types:
            raise ValueError(
                f"{file}: tensor {name} is of type {part.get_dtype()}; supported: "
                f"{', '.join(stored.types)}"
            )
        found = tuple(part.get_shape())
        check_shape(file, name, () if found == (1,) else found, stored.shape)
        return opened.get_tensor(name)


def _shards(folder: Path) -> dict[Path, list[str] | None]:
    """File -> the tensors that the index says it holds; None: all that are in it."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(
                f"{folder}: neither model.safetensors nor {index.name} is there; other weight "
                "formats (pytorch_model.bin) are not supported"
            )
        return {single: None}
    shards: dict[Path, list[str] | None] = {}
    for name, shard in _weight_map(index).items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index}: {shard!r} (of tensor {name}) is not a plain file name")
        held = shards.setdefault(folder / shard, [])
        assert held is not None
        held.append(name)
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        raise ValueError(f"{index}: can't be read as an index with a weight_map: {e!r}") from e


def _open(file: Path) -> Any:
    if not file.is_file():
        raise ValueError(f"{file}: this file of weights is missing; is the download complete?")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file}: damaged or truncated: {e}") from e
