from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from bench.peers import match
from bench.peers.match import Entry, Lap, Match, Rules
from bench.peers.prompts import Windows
from bench.peers.regimes import REGIMES, Regime
from tests.bench.peers.fakes import FakeRunner, Track

SMALL = Regime(
    name="small", title="small", measure="output", streams=2, prompt_tokens=3, output_tokens=10
)


def entry(label: str, track: Track, *seconds: float, fails: int | None = None) -> Entry:
    times = itertools.cycle(seconds or (1.0,))
    return Entry(label, lambda: FakeRunner(label, track, times, fails))


def played(
    entries: list[Entry], *, regime: Regime = SMALL, rounds: int = 2, done: int = 0, **rules: Any
) -> list[dict[str, Lap]]:
    windows = Windows(range(1000), "seed", regime.streams, regime.prompt_tokens)
    wanted = Rules(**{"rounds": rounds, "spare_bytes": 0, **rules})
    return list(Match(regime, entries, windows, wanted).play(done))


def test_in_turns_after_a_warm_up_each() -> None:
    track = Track()
    laps = played([entry("a", track), entry("b", track)])
    turn = ["resume", "generate", "pause"]
    warm_up = [(label, what) for label in "ab" for what in ("start", "generate", "pause")]
    rounds = [(label, what) for label in "abab" for what in turn]
    assert track.events == [*warm_up, *rounds, ("a", "close"), ("b", "close")]
    assert track.wanted["a"] == [8, 10, 10]
    assert [list(each) for each in laps] == [["a", "b"]] * 2
    assert laps[0]["a"].value == 2 * 10 / 1.0


def test_the_same_prompts_for_everyone_and_new_ones_each_round() -> None:
    track = Track()
    played([entry("a", track), entry("b", track)], rounds=3)
    assert track.prompts["a"] == track.prompts["b"]
    starts = [next(iter(prompt)) for prompts in track.prompts["a"] for prompt in prompts]
    assert len(starts) == len(set(starts)) == 2 * 4


def test_what_fails_is_out_and_the_race_goes_on() -> None:
    track = Track()
    entries = [
        entry("loads not", track, fails=0),
        entry("a", track),
        entry("warms not", track, fails=1),
        entry("falls", track, fails=3),
    ]
    laps = played(entries, rounds=3)
    assert [list(each) for each in laps] == [["a", "falls"], ["a"], ["a"]]
    assert [each.failure for each in entries] == ["it fell over", None, *["it fell over"] * 2]
    assert track.of("close") == ["loads not", "warms not", "falls", "a"]


def test_nobody_left() -> None:
    assert played([entry("a", Track(), fails=2)]) == [{}]


def test_a_figure_that_makes_no_sense_is_a_failure() -> None:
    decode = Regime(name="small", title="small", measure="decode", output_tokens=10)
    bad = entry("a", Track(), 1.0)
    played([bad], regime=decode)
    assert "no speed of decoding" in (bad.failure or "")


def test_goes_on_where_it_stopped() -> None:
    track, whole = Track(), Track()
    assert len(played([entry("a", track)], rounds=3, done=2)) == 1
    played([entry("a", whole)], rounds=3)
    assert track.prompts["a"][1:] == whole.prompts["a"][3:]  # the third round's own
    assert played([entry("a", track)], rounds=3, done=3) == []


def test_an_interruption_closes_everyone() -> None:
    track = Track()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        played([entry("a", track), entry("b", track)], before_round=interrupt)
    assert track.of("close") == ["a", "b"]


def test_short_of_memory_they_take_turns_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([100, 10])
    monkeypatch.setattr(match, "available_bytes", lambda: next(left))
    track = Track()
    laps = played([entry("a", track), entry("b", track)], spare_bytes=50)
    assert track.of("start") == ["a", "b", "b", "b"]
    assert track.of("close") == ["b", "b", "b", "a"]
    assert track.wanted["b"] == [8, 8, 10, 8, 10]  # warmed up each time it is started
    assert [list(each) for each in laps] == [["a", "b"]] * 2
    assert track.prompts["a"][1:] == track.prompts["b"][2::2]


@pytest.mark.parametrize("name", ["cold", "memory"])
def test_fresh_processes(name: str) -> None:
    track = Track()
    laps = played([entry("a", track), entry("b", track)], regime=REGIMES[name])
    assert track.of("start") == track.of("close") == ["a", "b"] * 3
    if name == "memory":
        assert [each["b"].value for each in laps] == [3.0, 3.0]
        assert track.wanted["a"] == [8, 256, 256]
    else:
        assert 0 < laps[0]["a"].value < 5
        assert track.wanted["a"] == [1, 1, 1]


def test_output_of_the_longest_call() -> None:
    def seconds() -> Iterator[float]:
        yield from (0.1, 2.0, 0.1)

    decode = Regime(name="small", title="small", measure="decode", output_tokens=10)
    track = Track()
    times = seconds()
    (laps,) = played([Entry("a", lambda: FakeRunner("a", track, times))], regime=decode, rounds=1)
    assert laps["a"].tokens == tuple(range(10))
    assert laps["a"].value == pytest.approx(9 / 1.9)
