"""Choices of bits, each for a budget in bytes: the file that `taut calibrate kv-bits` writes beside
a model, and formats called "calibrated" are read from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALIBRATED = "calibrated"

CELLS = ("format", "tail_tokens", "tail_format")
"""Fields of a KVSpec that a choice brings."""


def bits_file(model: Path) -> Path:
    """Where a model's choices lie: beside its file or folder."""
    return model.with_name(f"{model.name}.kv-bits.json")


def chosen_cells(model: Path, wanted: Mapping[str, object]) -> dict[str, Any]:
    """`CELLS` that were best for a budget and what is held to it (`KVSpec.breadth`). ValueError:
    nobody measured that; says what was."""
    file = bits_file(model)
    choices = read_choices(file)
    for choice in choices:
        if choice["for"] == wanted:
            return dict(choice["cells"])
    there = "; ".join(_words(choice["for"]) for choice in choices) or "nothing"
    raise ValueError(
        f"format {CALIBRATED}: measure it with `taut calibrate kv-bits MODEL`, or name a format;"
        f" {file} has {there}, not {_words(wanted)}"
    )


def read_choices(file: Path) -> list[dict[str, Any]]:
    """None where there is no file. ValueError: it is no such file."""
    if not file.is_file():
        return []
    try:
        choices = json.loads(file.read_text(encoding="utf-8"))["choices"]
        if all(isinstance(c["for"], dict) and set(c["cells"]) == set(CELLS) for c in choices):
            return list(choices)
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{file} is no file of `taut calibrate kv-bits`: remove it")


def write_choice(file: Path, choice: Mapping[str, Any]) -> None:
    """Beside those that are there, in the place of the one for the same."""
    others = [other for other in read_choices(file) if other["for"] != choice["for"]]
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps({"choices": [*others, choice]}, indent=2) + "\n", encoding="utf-8")
    os.replace(new, file)


def _words(wanted: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in wanted.items())
