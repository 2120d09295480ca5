"""The abacus: a pair of tiny reasoning models that come with the engine, and what they are asked.

They are an instrument: small enough to ship, and wrong when their chain's memory, weights or length
are cut carelessly. `models/<name>/` are Hugging Face folders, each with its model card.
"""

from __future__ import annotations

from pathlib import Path

NAMES = ("abacus", "abacus-small")

_HERE = Path(__file__).parent


def folder(name: str) -> Path:
    """Where the model lies, packaged or yet to be."""
    return _HERE / "models" / name


def questions() -> list[str]:
    """A handful, short and long, of every kind."""
    return (_HERE / "questions.txt").read_text(encoding="utf-8").splitlines()
