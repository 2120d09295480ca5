"""One uniform number a row, keyed by (seed, lineage, position) and by nothing else.

A row's draw must not depend on its place in a batch, on the draws before it, or on the device: so
there is no generator with a state, only a hash. Three rounds of splitmix64's finaliser (Steele,
Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), one for each part of the
key.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every input bit reaches every output bit."""
    word = word + _GAMMA
    word = (word ^ (word >> np.uint64(30))) * _MUL_1
    word = (word ^ (word >> np.uint64(27))) * _MUL_2
    return word ^ (word >> np.uint64(31))


def uniforms(keys: Iterable[tuple[int, int, int]]) -> NDArray[np.float64]:
    """For each (seed, lineage, position) a number in [0, 1) with 53 random bits.

    The parts may be any integers; their low 64 bits count.
    """
    words = np.array([[part & _WORD for part in key] for key in keys], dtype=np.uint64)  # [R, 3]
    seed, lineage, position = words.reshape(-1, 3).T
    mixed = _mix(_mix(_mix(seed) ^ lineage) ^ position)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
