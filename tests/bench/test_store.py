"""A run's record: what was done is never done again, and never mixed with another run's."""

import json
from pathlib import Path

import pytest

from bench.evaluation.records import Usage
from bench.evaluation.store import Store
from tests.bench.samples import sample

SETTINGS = {"model": "tiny", "seed": 0}


def filled(target: Path) -> Path:
    with Store(target, SETTINGS) as store:
        store.add(sample("p0"), Usage(wall_seconds=1.0, ran_tokens={"main": 3}))
        store.add(sample("p1", verdict="error", anatomy=None), Usage(wall_seconds=0.5))
    return target.with_name(target.name + ".partial")


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    filled(target)
    store = Store(target, SETTINGS)
    assert store.samples == [sample("p0")]  # what crashed is made again
    assert store.usages[0] == ("sums", Usage(wall_seconds=1.0, ran_tokens={"main": 3}))
    assert len(store.usages) == 2
    assert store.resumed == 1
    store.add(sample("p1"), Usage())
    store.finish({"a": 1})
    assert target.read_text() == '{"a": 1}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("lost", [1, 2, 40])
def test_a_line_that_was_cut_short_is_done_again(tmp_path: Path, lost: int) -> None:
    target = tmp_path / "run.json"
    record = filled(target)
    record.write_bytes(record.read_bytes()[:-lost])
    with Store(target, SETTINGS) as store:
        assert [each.problem for each in store.samples] == ["p0"]
        store.add(sample("p1"), Usage())
    with Store(target, SETTINGS) as store:
        assert [each.problem for each in store.samples] == ["p0", "p1"]


def test_a_first_line_that_was_cut_short(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    record = filled(target)
    record.write_bytes(record.read_bytes()[:10])
    with Store(target, SETTINGS) as store:
        store.add(sample(), Usage())
    with Store(target, SETTINGS) as store:
        assert len(store.samples) == 1


def test_another_run_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    before = filled(target).read_bytes()
    with pytest.raises(ValueError, match=r"run.json.partial .*seed 0 there, 1 now.*another --json"):
        Store(target, {"model": "tiny", "seed": 1})
    with pytest.raises(ValueError, match="top_k None there, 5 now"):
        Store(target, {**SETTINGS, "top_k": 5})
    assert target.with_name("run.json.partial").read_bytes() == before


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "no JSON\n", '{"settings": 3}\n'])
def test_what_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json.partial").write_text(text)
    with pytest.raises(ValueError, match="no record of a run"):
        Store(tmp_path / "run.json", SETTINGS)
    assert (tmp_path / "run.json.partial").read_text() == text


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    record = filled(tmp_path / "run.json")
    head, first, *rest = record.read_text().splitlines()
    broken = json.loads(first)
    del broken["sample"]["verdict"]
    record.write_text("\n".join([head, json.dumps(broken), *rest]) + "\n")
    with pytest.raises(ValueError, match=r"run.json.partial:2 .*verdict"):
        Store(tmp_path / "run.json", SETTINGS)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--json .*there is no folder"):
        Store(tmp_path / "none" / "run.json", SETTINGS)


def test_half_a_surrogate_pair_does_not_stop_a_run(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with Store(target, SETTINGS) as store:
        store.add(sample(text="a\ud83d b"), Usage())
    with Store(target, SETTINGS) as store:
        assert store.samples[0].text == "a? b"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with Store(target, SETTINGS) as store:
        store.add(sample(), Usage())
        with pytest.raises(ValueError, match="being written by another run"):
            Store(target, SETTINGS)
        store.add(sample("p1"), Usage())
    with Store(target, SETTINGS) as store:
        assert store.resumed == 2


def test_a_sample_that_stands_twice_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    with Store(target, SETTINGS) as store:
        store.add(sample(), Usage())
        store.add(sample(), Usage())
    with pytest.raises(ValueError, match=r"partial:3 is there twice: \('sums', 'p0', 0\)"):
        Store(target, SETTINGS)


def test_lines_are_told_by_their_newline_alone(tmp_path: Path) -> None:
    target, text = tmp_path / "run.json", "a\u2028b\x85c\x0cd"
    with Store(target, SETTINGS) as store:
        store.add(sample(text=text), Usage())
    with Store(target, SETTINGS) as store:
        assert store.samples[0].text == text


def test_nothing_done_leaves_nothing(tmp_path: Path) -> None:
    with Store(tmp_path / "run.json", SETTINGS):
        pass
    assert not list(tmp_path.iterdir())
