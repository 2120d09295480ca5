"""What the runner asks of a backend: the engine itself, or any OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bench.evaluation.records import Generation, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one sample is drawn. None: as the backend does by itself."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One sample to be made."""

    key: tuple[str, str, int]  # task, problem id, sample index
    messages: list[dict[str, str]]
    params: Sampling


class Backend(Protocol):
    """Makes samples. What fails for one sample is that sample's Generation, with finish_reason
    "error" and the words in `error`; the others go on."""

    @property
    def chain_rule(self) -> str:
        """In words: what counts as the chain."""
        ...

    def run(self, asks: Iterable[Ask]) -> Iterator[tuple[Ask, Generation]]:
        """In the order in which they finish; asks are pulled as there is room for them."""
        ...

    def usage(self) -> Usage:
        """Totals since the backend began; a task's are the differences."""
        ...

    def environment(self) -> Mapping[str, Any]:
        """What the backend adds to the record of where and on what; JSON."""
        ...

    def close(self) -> None: ...
