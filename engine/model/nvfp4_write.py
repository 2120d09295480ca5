"""Writes a model with NVFP4 weights as a folder that other engines load: compressed-tensors' layout
of weights alone (NVFP4A16).

The matrices of attention and MLP are quantised; embedding, LM head, norms and biases stay as the
source gives them. Read back, every value is the one that `weights="nvfp4"` has of the source.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.kernels import nvfp4
from engine.model import packaged
from engine.model.checkpoint import Checkpoint
from engine.model.folder_write import write_around, write_json
from engine.model.nvfp4_stored import COMPRESSED, quantization_config
from engine.model.tensors import Shape, tensor_shapes
from engine.model.workers import workers

FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Matrices of the same inputs: engines that run them as one want one tensor scale for them."""

SHARD_BYTES = 4 << 30
"""A file of weights is closed once it holds so much."""


class Written(NamedTuple):
    """What a folder came to: bytes of weights, and how many of those are in NVFP4."""

    nbytes: int
    packed_nbytes: int


def write_nvfp4(
    checkpoint: Checkpoint, model: str, out: Path, search: nvfp4.ScaleSearch = "max"
) -> Written:
    """Write the folder `out`, which appears whole or not at all; `model` is what the user named.

    ValueError: `out` holds something already, or the source can't be written so.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"out must be a new or empty folder, and {out} holds something already")
    if checkpoint.stored_format is not None:
        raise ValueError(f"{checkpoint.source} is quantised to {checkpoint.stored_format} already")
    checkpoint.check()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        work.chmod(0o755)
        write_around(checkpoint, work, quantization_config())
        (work / "README.md").write_text(_card(checkpoint, model, search), encoding="utf-8")
        written = _write_weights(checkpoint, work, search)
        work.replace(out)  # an empty folder gives way
    except BaseException:
        shutil.rmtree(work)
        raise
    return written


def _write_weights(checkpoint: Checkpoint, folder: Path, search: nvfp4.ScaleSearch) -> Written:
    config = checkpoint.config
    shapes = tensor_shapes(config)
    shards = _Shards(folder)
    packed_nbytes = 0
    with workers() as pool:
        for index in range(config.layers):
            packed = _layer(checkpoint, f"model.layers.{index}.", shapes, search, pool)
            packed_nbytes += sum(tensor.nbytes for tensor in packed.values())
            shards.add(packed)
    packed_names = {f"{module}.weight" for group in FUSED for module in group}
    for name, shape in shapes.items():
        if name.split(".", 3)[-1] not in packed_names:
            shards.add({name: checkpoint.tensor(name, shape).clone()})  # apart from the mapped file
    return Written(shards.finish(), packed_nbytes)


def _layer(
    checkpoint: Checkpoint,
    prefix: str,
    shapes: Mapping[str, Shape],
    search: nvfp4.ScaleSearch,
    pool: ThreadPoolExecutor,
) -> dict[str, Tensor]:
    """One layer's matrices, as the tensors that stand for them."""

    def group(modules: tuple[str, ...]) -> dict[str, Tensor]:
        names = [f"{prefix}{module}.weight" for module in modules]
        matrices = [checkpoint.tensor(name, shapes[name]) for name in names]
        try:
            found = nvfp4.quantise(torch.cat(matrices), search)
        except ValueError as error:
            raise ValueError(f"{checkpoint.source}: {', '.join(names)}: {error}") from error
        inverse = torch.tensor([found.inverse], dtype=torch.float32)
        tensors: dict[str, Tensor] = {}
        start = 0
        for name, matrix in zip(names, matrices, strict=True):
            rows = slice(start, start + len(matrix))
            blocks = found.blocks[rows].view(torch.float8_e4m3fn)
            parts = (found.codes[rows], blocks, inverse)
            stored = COMPRESSED.parts(name, shapes[name])
            tensors |= {part: t.clone() for part, t in zip(stored, parts, strict=True)}
            start = rows.stop
        return tensors

    merged: dict[str, Tensor] = {}
    for tensors in pool.map(group, FUSED):
        merged |= tensors
    return merged


class _Shards:
    """Files of weights, each written as soon as it is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._nbytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._held |= tensors
        if sum(tensor.nbytes for tensor in self._held.values()) >= SHARD_BYTES:
            self._write()

    def finish(self) -> int:
        """Name the files by their number, and write the index where there are several."""
        if self._held:
            self._write()
        count = len(self._files)
        if count == 1:
            self._file(0).rename(self._folder / "model.safetensors")
            return self._nbytes
        where: dict[str, str] = {}
        for i, names in enumerate(self._files):
            name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            self._file(i).rename(self._folder / name)
            where |= dict.fromkeys(names, name)
        index = {"metadata": {"total_size": self._nbytes}, "weight_map": where}
        write_json(self._folder / "model.safetensors.index.json", index)
        return self._nbytes

    def _file(self, index: int) -> Path:
        return self._folder / f"part-{index}.safetensors"

    def _write(self) -> None:
        save_file(self._held, self._file(len(self._files)), {"format": "pt"})
        self._nbytes += sum(tensor.nbytes for tensor in self._held.values())
        self._files.append(list(self._held))
        self._held = {}


def _card(checkpoint: Checkpoint, model: str, search: nvfp4.ScaleSearch) -> str:
    base, licence = _origin(checkpoint, model)
    head: dict[str, Any] = {"base_model": base, "tags": ["nvfp4", "compressed-tensors"]}
    if licence is not None:
        head["license"] = licence.lower()
    lines = [f"{key}: {json.dumps(value)}" for key, value in head.items()]  # JSON is YAML too
    already = (
        "The source file was quantised already: what it had lost is lost here too.\n"
        if checkpoint.metadata is not None
        else ""
    )
    return (
        "---\n" + "\n".join(lines) + "\n---\n\n"
        f"# {base}, weights in NVFP4\n\n"
        f"Made from {base} by `taut quantize --format nvfp4 --scale {search}`: the matrices of "
        "attention and MLP have 4-bit weights (E2M1) with an E4M3 scale for 16 of them and a "
        "float32 scale a tensor; embedding, LM head, norms and biases are the source's, and "
        f"activations aren't quantised (compressed-tensors, NVFP4A16).\n{already}\n"
        + (
            f"Licence of the source: {licence}.\n"
            if licence is not None
            else "The source doesn't name its licence; ask its makers before you pass this on.\n"
        )
    )


def _origin(checkpoint: Checkpoint, model: str) -> tuple[str, str | None]:
    """The source's public name, never where it lies on this machine, and its licence if known."""
    if model in packaged.MODELS:
        return packaged.MODELS[model].upstream, packaged.MODELS[model].licence
    if checkpoint.metadata is not None:
        licence = checkpoint.metadata.get("general.license")
        return Path(model).stem, licence if isinstance(licence, str) else None
    assert checkpoint.folder is not None
    local = Path(model).expanduser().is_dir()
    return Path(model).resolve().name if local else model, _licence_of(checkpoint.folder)


def _licence_of(folder: Path) -> str | None:
    """What the front of the folder's own card says."""
    card = folder / "README.md"
    lines = (
        card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    )
    if lines[:1] != ["---"]:
        return None
    front = lines[1 : lines.index("---", 1)] if "---" in lines[1:] else []
    found = [line.split(":", 1)[1].strip() for line in front if line.startswith("license:")]
    return found[0].strip("\"'") if found else None
