"""Loops against their definition, read token by token; thresholds; the detector's check points."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.scheduler.detect import Loop, LoopDetector, LoopSpec, find_loop

SMALL = LoopSpec(max_period=6, copies=3, least_tokens=8, every=4)

looping = st.tuples(
    st.lists(st.integers(0, 2), max_size=12),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.integers(0, 40),
    st.lists(st.integers(0, 2), max_size=6),
).map(lambda parts: [*parts[0], *cycle(parts[1], parts[2]), *parts[3]])
"""Something, a cycle that breaks off anywhere, and something again, of an alphabet of three."""


def cycle(copy: list[int], length: int) -> list[int]:
    return [copy[i % len(copy)] for i in range(length)]


def distinct(count: int) -> list[int]:
    """Tokens with no repetition, and none that the tests' cycles use."""
    return list(range(10_000, 10_000 + count))


def by_definition(tokens: list[int], spec: LoopSpec) -> Loop | None:
    for period in range(1, spec.max_period + 1):
        start = len(tokens)
        while start > 0 and (
            start + period > len(tokens) or tokens[start - 1] == tokens[start - 1 + period]
        ):
            start -= 1
        covered = len(tokens) - start
        if covered >= spec.copies * period and covered >= spec.least_tokens:
            return Loop(start, period)
    return None


def reports(detector: LoopDetector, tokens: list[int]) -> list[Loop | None]:
    return [detector.feed(token) for token in tokens]


def at_check_points(tokens: list[int], spec: LoopSpec) -> list[Loop | None]:
    return [
        None if end % spec.every else by_definition(tokens[:end], spec)
        for end in range(1, len(tokens) + 1)
    ]


@given(looping)
@example([])
def test_is_what_the_definition_says(tokens: list[int]) -> None:
    assert find_loop(tokens, SMALL) == by_definition(tokens, SMALL)


@given(st.randoms(use_true_random=False), st.integers(1, 300), st.integers(0, 1000))
def test_is_what_the_definition_says_at_full_size(
    rng: random.Random, period: int, length: int
) -> None:
    copy = [rng.randrange(3) for _ in range(period)]
    tokens = [rng.randrange(3) for _ in range(20)] + cycle(copy, length)
    assert find_loop(tokens) == by_definition(tokens, LoopSpec())


@pytest.mark.parametrize(
    ("period", "length", "loops"),
    [
        (1, 47, False),
        (1, 48, True),
        (7, 47, False),
        (7, 48, True),
        (16, 48, True),
        (17, 50, False),  # long enough, a token short of three copies
        (17, 51, True),
        (256, 767, False),
        (256, 768, True),
        (257, 2000, False),
    ],
)
def test_thresholds(period: int, length: int, loops: bool) -> None:
    tokens = distinct(5) + cycle(list(range(period)), length)
    assert find_loop(tokens) == (Loop(5, period) if loops else None)
    assert find_loop(tuple(tokens[5:])) == (Loop(0, period) if loops else None)


def test_starts_where_the_cycle_starts_to_hold() -> None:
    copy = list(range(20))
    assert find_loop(distinct(9) + copy[-3:] + copy * 4) == Loop(9, 20)
    assert find_loop(distinct(9) + copy * 4 + copy[:3]) == Loop(9, 20)


def test_a_loop_that_was_left_is_none() -> None:
    looped = distinct(9) + list(range(20)) * 4
    assert find_loop([*looped, 2]) is None, "an end-of-sequence token leaves it too"
    assert find_loop(looped + distinct(60)) is None
    seen = [loop for loop in reports(LoopDetector(), looped + distinct(60)) if loop]
    assert seen == [Loop(9, 20)], "a detector was there"


@given(looping)
def test_incremental_is_batch_at_the_check_points(tokens: list[int]) -> None:
    assert reports(LoopDetector(SMALL), tokens) == at_check_points(tokens, SMALL)


@pytest.mark.parametrize("every", [1, 7, 100])
def test_a_long_loop_keeps_its_start(every: int) -> None:
    spec = LoopSpec(max_period=6, copies=2, least_tokens=2, every=every)
    tokens = [5, *cycle([0, 0, 1], 150), *cycle([0, 1], 150), *cycle([0, 0, 1], 150)]
    assert reports(LoopDetector(spec), tokens) == at_check_points(tokens, spec)


@given(looping, looping, st.integers(0, 60))
def test_rewound_is_as_if_never_fed(before: list[int], after: list[int], count: int) -> None:
    detector = LoopDetector(SMALL)
    reports(detector, before)
    detector.rewind(count)
    kept = before[:count]
    assert reports(detector, after) == at_check_points(kept + after, SMALL)[len(kept) :]


@given(looping, looping, looping)
def test_forks_go_their_own_ways(before: list[int], one: list[int], two: list[int]) -> None:
    detector = LoopDetector(SMALL)
    reports(detector, before)
    twin = detector.fork()
    for follows, tokens in ((detector, one), (twin, two)):
        expected = at_check_points(before + tokens, SMALL)[len(before) :]
        assert reports(follows, tokens) == expected
    twin.rewind(len(before) // 2)
    expected = at_check_points(before[: len(before) // 2] + one, SMALL)
    assert reports(twin, one) == expected[len(before) // 2 :]


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_period", 0), ("copies", 1), ("least_tokens", 0), ("every", 0), ("every", 1.5)],
)
def test_refused_in_words(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be an integer of at least"):
        LoopSpec(**{field: value})  # type: ignore[arg-type]
