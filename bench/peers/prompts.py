"""The prompts that all engines get alike: windows of a text, as ids of Taut's own tokenizer.

No two windows of a regime start at the same token, so that no prefix cache can help, until a text
is used up.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from bench.common import ROOT

TEXT = ROOT / "LICENSE"  # English that every checkout has, unchanged from commit to commit


class Windows:
    """Of one regime: `take` gives the next prompts of a round, the same for every engine."""

    def __init__(self, ids: Sequence[int], seed: str, streams: int, length: int) -> None:
        if not ids:
            raise ValueError("the text for prompts has no tokens")
        self._ids = list(ids)
        self._starts = list(range(len(ids)))
        random.Random(seed).shuffle(self._starts)
        self._streams = streams
        self._length = length

    def take(self, call: int) -> list[list[int]]:
        """Those of the call-th call."""
        first = call * self._streams
        picked = [self._starts[(first + i) % len(self._starts)] for i in range(self._streams)]
        return [self._window(start) for start in picked]

    def _window(self, start: int) -> list[int]:
        """Past the end the text starts again."""
        count = len(self._ids)
        return [self._ids[(start + i) % count] for i in range(self._length)]


def digest(ids: Sequence[int]) -> str:
    """Tells at a glance whether two races had the same text and tokenizer."""
    return hashlib.blake2b(repr(list(ids)).encode(), digest_size=8).hexdigest()
