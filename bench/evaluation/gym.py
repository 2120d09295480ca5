"""Problems that reasoning-gym's generators make, with their own scorers."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from bench.evaluation.records import Problem

GYM = "reasoning-gym"
_NONSENSE = "bananas"  # no problem's answer
_SETTINGS = ("seed", "size")  # of every generator, and ours to set


class Gym:
    """One of its generators, with its parameters. ValueError: none of that name, or of theirs."""

    def __init__(self, name: str, params: Mapping[str, Any]) -> None:
        self._name, self._params = name, params
        known = _generators()
        if name not in known:
            close = ", ".join(difflib.get_close_matches(name, known)) or "none"
            raise ValueError(
                f"reasoning-gym has no generator {name!r} of its {len(known)}; close to it: {close}"
            )
        fields = [f.name for f in dataclasses.fields(known[name]) if f.name not in _SETTINGS]
        for each in params:
            if each in _SETTINGS:
                raise ValueError(f"{name}: {each} follows from the run's own seed and limit")
            if each not in fields:
                raise ValueError(f"{name} has no parameter {each}; known: {', '.join(fields)}")
        self._dataset(seed=0, size=1)

    def make(self, task: str, limit: int, seed: int) -> list[Problem]:
        made = self._dataset(seed=seed, size=limit)
        entries = [made[i] for i in range(limit)]
        if any(_takes_anything(made, entry) for entry in entries):
            raise ValueError(f"{task} can't be graded: its scorer takes anything for right")
        return [
            Problem(
                id=f"{self._name}-{seed}-{index}",
                task=task,
                question=entry["question"],
                answer=entry["answer"] or "",  # None: any that fits, which only the scorer knows
                grader=GYM,
                entry={"name": self._name, "params": dict(self._params), "entry": entry},
            )
            for index, entry in enumerate(entries)
        ]

    def _dataset(self, *, seed: int, size: int) -> Any:
        import reasoning_gym

        try:
            return reasoning_gym.create_dataset(self._name, seed=seed, size=size, **self._params)
        except Exception as error:  # it is a stranger's, and checks little
            raise ValueError(
                f"reasoning-gym:{self._name}: {type(error).__name__}: {error}"
            ) from None


def _generators() -> dict[str, type]:
    """The class of each generator's parameters, by name."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ValueError("reasoning-gym is missing: pip install 'taut[quality]'") from None
    return {name: config for name, (_, config) in DATASETS.items()}


def _takes_anything(generator: Any, entry: Mapping[str, Any]) -> bool:
    try:
        return float(generator.score_answer(_NONSENSE, entry)) >= 1.0
    except Exception:  # some scorers raise at what isn't of their form
        return False
