"""The folder of a grid: finished runs of `bench.quality`, each told where in the grid it belongs.

A run that is there is never made again. What decides it is in its settings, the model's bytes and
the profile's too: a folder of another model, task or configuration is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.evaluation.records import Run
from bench.evaluation.show import read_run
from bench.evaluation.store import differences

PROFILE = "kv-wave.json"


class Result(NamedTuple):
    """A finished run, and its place."""

    part: str
    method: str
    budget: str | None  # its label
    cells: int | None  # that the budget is
    run: Run


def results(folder: Path) -> list[Result]:
    """Every run that is there. ValueError: no folder, or a file that is no run of a grid."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    return list(_read(folder))


def _read(folder: Path) -> Iterator[Result]:
    for path in sorted(folder.glob("*.json")):
        if path.name == PROFILE:
            continue
        run = read_run(path)
        place = run.settings.get("grid")
        if not isinstance(place, Mapping):
            raise ValueError(f"{path} is a run of bench.quality, but none of a grid")
        yield Result(**place, run=run)


def is_done(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the run is there. ValueError: it is, but made otherwise."""
    if not path.is_file():
        return False
    if other := differences(read_run(path).settings, settings):
        raise ValueError(f"{path} was made otherwise ({other}): give another --out, or remove it")
    return True


def digest_of(model: Path) -> str:
    """Of a model's weights and settings: its file, or its folder's."""
    files = [model] if model.is_file() else sorted(p for p in model.iterdir() if p.is_file())
    held = hashlib.blake2b(digest_size=8)
    for file in files:
        if file.suffix in (".json", ".safetensors", ".gguf"):
            with file.open("rb") as opened:
                held.update(hashlib.file_digest(opened, "blake2b").digest())
    return held.hexdigest()
