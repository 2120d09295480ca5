"""The abacus's problems as a task of `bench.quality`: fresh for each seed, graded exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Any

from bench.abacus import problems
from bench.evaluation.records import Problem

ABACUS = "abacus"


@dataclass(frozen=True, kw_only=True)
class Abacus:
    """Chains of `min_tokens` to `max_tokens` as the solution writes them, of one kind or the mix.

    No training pool has the seeds that are used here, which are text of another form.
    """

    min_tokens: int = 50
    max_tokens: int = 400
    kind: str | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Abacus:
        """ValueError names a parameter that isn't known, or its bad value."""
        known = [field.name for field in fields(cls)]
        for name in params:
            if name not in known:
                raise ValueError(f"{ABACUS} has no parameter {name}; known: {', '.join(known)}")
        return cls(**params)

    def __post_init__(self) -> None:
        for name in ("min_tokens", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{ABACUS}: {name} must be a positive integer, not {value!r}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"{ABACUS}: min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}"
            )
        if self.kind is not None and self.kind not in problems.KINDS:
            known = ", ".join(problems.KINDS)
            raise ValueError(f"{ABACUS}: kind must be of {known}, not {self.kind!r}")

    def solved(self, limit: int, seed: int) -> list[problems.Problem]:
        """With their solutions."""
        rng = Random(f"{ABACUS} task {self.kind} {self.min_tokens} {self.max_tokens} {seed}")
        least, most = self.min_tokens, self.max_tokens
        return [problems.sample(rng, self.kind, least, most) for _ in range(limit)]

    def make(self, task: str, limit: int, seed: int) -> list[Problem]:
        return [
            Problem(
                id=f"{problem.kind}-{seed}-{index}",
                task=task,
                question=problem.question,
                answer=problem.answer,
                grader="exact",
                instruction="",
            )
            for index, problem in enumerate(self.solved(limit, seed))
        ]
