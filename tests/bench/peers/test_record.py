from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.peers.match import Entry
from bench.peers.record import Record
from bench.peers.regimes import REGIMES
from tests.bench.peers.fakes import FakeRunner, Track, lap

SINGLE, LONG = REGIMES["single"], REGIMES["long"]
LOST = "it lost m.gguf, at line 3"
SETTINGS = {"model": "m", "configurations": ["taut:bf16", "a:q4"]}


def entry(label: str, failure: str | None = None) -> Entry:
    made = Entry(label, lambda: FakeRunner(label, Track(), iter([])))
    made.failure, made.about = failure, {"versions": {label: "1"}}
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "race.json"


def written(path: Path) -> Record:
    record = Record(path, SETTINGS)
    entries = [
        entry("taut:bf16"),
        entry("a:q4"),
        entry("b:x", "it lost /home/me/models/m.gguf, at line 3"),
    ]
    for ours, theirs in ((30, 10), (20, 10), (60, 20)):
        laps = {"taut:bf16": lap(ours, 0.01, 5, 6, 7), "a:q4": lap(theirs, None, 5, 6, 8)}
        record.add(SINGLE, laps, entries)
    return record


def test_what_is_written_is_read(path: Path) -> None:
    record = written(path)
    again = Record(path, SETTINGS)
    assert again.rounds == record.rounds
    assert again.failures == {"single": {"b:x": LOST}}
    assert again.about == record.about
    assert (again.done(SINGLE), again.done(LONG)) == (3, 0)
    assert len(again.environments) == 2  # a sitting each
    assert not path.with_name("race.json.new").exists()


def test_a_reader_finds_ratios_first(path: Path) -> None:
    written(path)
    single = json.loads(path.read_text())["regimes"]["single"]
    assert single["ratios"] == {"taut:bf16": {"a:q4": {"min": 2.0, "median": 3.0, "max": 3.0}}}
    assert (single["best_taut"], single["best_peer"]) == ("taut:bf16", "a:q4")
    assert single["figures"]["a:q4"] == {"min": 10, "median": 10, "max": 20}
    assert single["agreement_tokens"] == {"taut:bf16": 3, "a:q4": 2}
    assert single["failures"] == {"b:x": LOST}


def test_other_settings_are_refused(path: Path) -> None:
    written(path)
    with pytest.raises(ValueError, match=r"other settings.*model 'm' there, 'other' now"):
        Record(path, {**SETTINGS, "model": "other"})


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 2, "settings": {}}'])
def test_no_record_is_refused_and_kept(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match="no record of a race"):
        Record(path, SETTINGS)
    assert path.read_text() == text


def test_a_regime_can_be_raced_again(path: Path) -> None:
    written(path).forget(SINGLE)
    record = Record(path, SETTINGS)
    record.forget(SINGLE)
    assert record.done(SINGLE) == 0
    assert record.failures == {}
    record.forget(LONG)


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    record = Record(None, SETTINGS)
    record.add(SINGLE, {"taut:bf16": lap(1)}, [])
    assert record.done(SINGLE) == 1
    assert list(tmp_path.iterdir()) == []
