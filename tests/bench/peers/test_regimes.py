from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.peers.peer import Timing
from bench.peers.regimes import FIRST_TOKEN_TRIES, MEASURES, REGIMES, Regime


def taken(measure: str, generate: Callable[[int], Timing]) -> float:
    take = MEASURES[measure].take
    assert take is not None
    sizes = {"streams": 4, "prompt_tokens": 100, "output_tokens": 11}
    return take(Regime(name="r", title="r", measure=measure, **sizes), generate)


def test_decoding_starts_after_the_first_token() -> None:
    told = Timing(3.0, first_seconds=1.0)
    assert taken("decode", lambda _: told) == 4 * 10 / 2.0
    apart = {11: Timing(3.0), 1: Timing(0.5)}
    assert taken("decode", apart.__getitem__) == 4 * 10 / 2.5


def test_whole_runs() -> None:
    assert taken("output", {11: Timing(2.0, first_seconds=1.0)}.__getitem__) == 4 * 11 / 2.0
    assert taken("prompt", {1: Timing(0.5)}.__getitem__) == 4 * 100 / 0.5


def test_the_first_token_is_the_median_of_a_few() -> None:
    times = iter([0.1, 0.9, 0.02, 0.03, 0.04])
    assert taken("first", lambda _: Timing(next(times))) == pytest.approx(40.0)
    assert next(times, None) is None
    assert FIRST_TOKEN_TRIES == 5


def test_every_regime_has_a_measure_and_room_in_small_models() -> None:
    for regime in REGIMES.values():
        assert regime.how.better in ("higher", "lower")
        assert regime.context_tokens <= 2304
