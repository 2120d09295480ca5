"""Uniform numbers keyed by integers, and by nothing else.

What is drawn for a row or a cell must not depend on its place in a batch, on the draws before it,
or on the device: so there is no generator with a state, only a hash. One round of splitmix64's
finaliser (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) for each
part of the key.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_WORD = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)


def _mix(word: Words) -> Words:
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    word = word + _GAMMA
    word = (word ^ (word >> np.uint64(30))) * _MUL_1
    word = (word ^ (word >> np.uint64(27))) * _MUL_2
    return word ^ (word >> np.uint64(31))


def words(values: Iterable[int]) -> Words:
    """The low 64 bits of any integers, [n]."""
    return np.array([value & _WORD for value in values], dtype=np.uint64)


def hashed(first: Words, *parts: Words) -> Words:
    """A word for each key; its parts are arrays, broadcast together."""
    mixed = _mix(first)
    for part in parts:
        mixed = _mix(mixed ^ part)
    return mixed


def fractions(hashes: Words) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 random bits."""
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniforms(keys: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """For each (seed, lineage, position) a number in [0, 1)."""
    return fractions(hashed(*map(words, zip(*keys, strict=True))))
