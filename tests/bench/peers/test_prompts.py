from __future__ import annotations

import itertools

import pytest

from bench.peers.prompts import Windows, digest

IDS = list(range(100, 150))


def test_windows_run_on_past_the_end() -> None:
    windows = Windows(IDS, "seed", streams=2, length=60)
    for window in windows.take(0):
        expected = itertools.islice(itertools.cycle(IDS), window[0] - 100, window[0] - 40)
        assert window == list(expected)


def test_no_two_start_alike_while_the_text_lasts() -> None:
    windows = Windows(IDS, "seed", streams=5, length=3)
    starts = [prompt[0] for call in range(10) for prompt in windows.take(call)]
    assert sorted(starts) == IDS
    assert windows.take(10) == windows.take(0)


def test_a_seed_decides() -> None:
    def of(seed: str) -> list[list[int]]:
        return Windows(IDS, seed, streams=3, length=4).take(2)

    assert of("0/single") == of("0/single")
    assert of("0/single") != of("0/long")


def test_no_text() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Windows([], "seed", 1, 1)


def test_digests_tell_texts_apart() -> None:
    assert digest([1, 2]) == digest((1, 2)) != digest([12])
