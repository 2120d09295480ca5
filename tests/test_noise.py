from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.noise import uniforms

N = 20_000


def chi_square(numbers: np.ndarray, bins: int) -> float:
    counts = np.histogram(numbers, bins=bins, range=(0.0, 1.0))[0]
    expected = len(numbers) / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_uniform_along_each_part_of_the_key() -> None:
    for base in (0, 1, 2**63 - 5, -7):
        for axis in range(3):
            keys = [
                (i, base, 5) if axis == 0 else (base, i, 5) if axis == 1 else (base, 5, i)
                for i in range(N)
            ]
            numbers = uniforms(keys)
            assert numbers.min() >= 0.0
            assert numbers.max() < 1.0
            # 63 degrees of freedom: mean 63, standard deviation 11.2
            assert 63 - 5 * 11.2 < chi_square(numbers, 64) < 63 + 5 * 11.2
            # neighbours don't know each other: standard deviation 1 / sqrt(N)
            assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(N)


def test_pairs_of_neighbours_fill_the_square() -> None:
    numbers = uniforms((seed, 0, position) for seed in range(200) for position in range(100))
    x, y = numbers[:-1], numbers[1:]
    counts = np.histogram2d(x, y, bins=8, range=((0, 1), (0, 1)))[0]
    expected = len(x) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * 11.2


def test_parts_of_the_key_are_not_interchangeable() -> None:
    keys = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (2, 3, 1), (3, 1, 2), (3, 2, 1), (0, 0, 6), (6, 0, 0)]
    assert len(set(uniforms(keys).tolist())) == len(keys)


def test_every_bit_of_the_key_counts() -> None:
    keys = [(0, 0, 0)]
    for bit in range(64):
        keys += [(1 << bit, 0, 0), (0, 1 << bit, 0), (0, 0, 1 << bit)]
    assert len(set(uniforms(keys).tolist())) == len(keys)


@given(st.lists(st.tuples(st.integers(), st.integers(), st.integers(min_value=0)), min_size=1))
def test_a_key_alone_gives_what_it_gives_among_others(keys: list[tuple[int, int, int]]) -> None:
    together = uniforms(keys)
    assert together.tolist() == [float(uniforms([key])[0]) for key in keys]
