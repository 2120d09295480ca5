"""One chain taken apart: its thoughts, how often they repeat, and when the answer first stands in
it. Pure; the answer is looked for as text (see mentions.py), so all of it is a hint, not a proof.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from bench.evaluation.mentions import first_mention
from bench.evaluation.records import Anatomy

REPEATS_ABOVE = 0.5
"""Overlap (Jaccard, of word trigrams) with one earlier thought from which a thought repeats it."""

Grams = frozenset[tuple[str, ...]]


def take_apart(chain_text: str, final_answer: str | None, expected: str) -> Anatomy:
    """A chain without its markers. Where an answer first appears is a share of the characters; None
    where it never does, or there is none."""
    thoughts = split_thoughts(chain_text)
    repeated = count_repeated(_grams(thought) for thought in thoughts)
    return Anatomy(
        thoughts=len(thoughts),
        repetition=repeated / len(thoughts) if thoughts else 0.0,
        first_answer=None if final_answer is None else _share(chain_text, final_answer),
        first_right=_share(chain_text, expected),
    )


def split_thoughts(chain_text: str) -> list[str]:
    """Thoughts end at a blank line, as the engine's do; white space alone is none."""
    return [part for part in chain_text.split("\n\n") if part.strip()]


def _grams(thought: str) -> Grams:
    """Word trigrams; of fewer words, all of them as one gram."""
    words = thought.casefold().split()
    if len(words) < 3:
        return frozenset((tuple(words),))
    return frozenset(zip(words, words[1:], words[2:], strict=False))


def count_repeated(thoughts: Iterable[Grams]) -> int:
    """How many overlap with some earlier one by more than `REPEATS_ABOVE`.

    Equal ones are told by a dict, so a loop costs nothing; the distinct ones through an index of
    which thoughts have a gram, all earlier ones at once.
    """
    held = list(thoughts)
    distinct = list(dict.fromkeys(held))
    return len(held) - len(distinct) + _count_similar(distinct)


def _count_similar(thoughts: list[Grams]) -> int:
    sizes = np.array([len(grams) for grams in thoughts], dtype=np.int64)
    having: dict[tuple[str, ...], list[int]] = {}
    for number, grams in enumerate(thoughts):
        for gram in grams:
            having.setdefault(gram, []).append(number)
    index = {g: np.array(numbers) for g, numbers in having.items() if len(numbers) > 1}
    similar = 0
    for number, grams in enumerate(thoughts):
        shared = _shared(number, [index[gram] for gram in grams if gram in index])
        overlaps = shared / (sizes[:number] + sizes[number] - shared)
        similar += bool((overlaps > REPEATS_ABOVE).any())
    return similar


def _shared(number: int, holders: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """How many grams each thought before `number` shares with it, from those that have each."""
    if not holders:
        return np.zeros(number, dtype=np.int64)
    return np.bincount(np.concatenate(holders), minlength=number)[:number]


def _share(text: str, answer: str) -> float | None:
    start = first_mention(text, answer)
    return None if start is None else start / len(text)
