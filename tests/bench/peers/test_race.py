"""The whole race, with programs in the place of engines."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import race
from bench.peers import busy, llamacpp, registry, table, taut
from bench.peers.peer import Configuration, Job, Peer, Runner
from bench.peers.record import Record
from bench.peers.regimes import REGIMES, Regime
from bench.peers.registry import configurations
from bench.peers.worker import WorkerRunner
from engine.options import ModelOptions

COMMAND = [sys.executable, "-S", "-m", "tests.bench.peers.worker"]
SHORT = {
    "single": Regime(
        name="single", title="one stream", measure="output", prompt_tokens=3, output_tokens=4
    ),
    "memory": Regime(
        name="memory", title="peak memory", measure="memory", prompt_tokens=3, output_tokens=4
    ),
}


def peer(name: str, **settings: Any) -> Peer:
    def runner(configuration: Configuration, job: Job) -> Runner:
        return WorkerRunner(COMMAND, job, configuration.settings)

    made = Configuration(peer=name, name="x", bits=4, files="file", settings=settings)
    return Peer(name=name, configurations=(made,), runner=runner)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Peer]:
    found = {"taut": peer("taut"), "good": peer("good"), "dies": peer("dies", dies=2)}
    for module in (race, registry):
        monkeypatch.setattr(module, "ENGINES", found)
    monkeypatch.setattr(taut, "PEER", found["taut"])
    monkeypatch.setattr(race, "prepare", lambda model, racing: {"file": Path("model")})
    monkeypatch.setattr(race, "text_ids", lambda files, text: list(range(300)))
    monkeypatch.setattr(race, "environment", lambda: {"commit": "abc"})
    for name, regime in SHORT.items():
        monkeypatch.setitem(REGIMES, name, regime)
    return found


def asked(path: Path, **changes: Any) -> Namespace:
    args = race.arguments(["--peers", "good,dies", "--allow-busy", "--json", str(path)])
    for name, value in {"regimes": "single", "repeat": 2, "timeout": 30.0, **changes}.items():
        setattr(args, name, value)
    return args


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "race.json"


def test_a_race_with_one_that_dies(engines: dict[str, Peer], path: Path) -> None:
    record = race.race(asked(path, regimes="single,memory"))
    assert [list(laps) for laps in record.rounds["single"]] == [["taut:x", "good:x"]] * 2
    assert [len(laps) for laps in record.rounds["memory"]] == [3, 3]  # one call a process
    why = record.failures["single"]["dies:x"]
    assert "died (status 3) when asked to run 1 prompts" in why
    held = json.loads(path.read_text())
    assert held["configurations"]["good:x"] == {
        "bits": 4,
        "files": "file",
        "versions": {"fake": "1"},
        "flags": {"streams": 1},
    }
    assert list(held["regimes"]["single"]["ratios"]["taut:x"]) == ["good:x"]

    text = shown(record)
    assert "taut:x" in text
    assert "dies:x is out: it died (status 3)" in text
    lines = table.markdown(record).splitlines()
    assert lines[2].startswith("| one stream (output tokens/s) | ")
    assert lines[3].startswith("| peak memory (MiB, lower is better) | ")
    assert lines[2].count("|") == lines[1].count("|") == 6


def shown(record: Record) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table.outcome(record))
    console.file.close()
    return console.export_text()


def test_goes_on_after_an_interruption(
    engines: dict[str, Peer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([None, None, KeyboardInterrupt()])

    def quiet(args: Namespace) -> None:
        if (raised := next(calls, None)) is not None:
            raise raised

    monkeypatch.setattr(race, "be_quiet", quiet)
    with pytest.raises(KeyboardInterrupt):
        race.race(asked(path))
    first = json.loads(path.read_text())["regimes"]["single"]
    assert len(first["rounds"]) == 1
    record = race.race(asked(path))
    second = json.loads(path.read_text())["regimes"]["single"]
    assert second["rounds"][0] == first["rounds"][0]
    assert len(second["rounds"]) == 2
    assert list(record.failures["single"]) == ["dies:x"]

    finished = path.read_text()
    race.race(asked(path))
    assert path.read_text() == finished  # nothing was left to do
    race.race(asked(path, again="single"))
    assert json.loads(path.read_text())["regimes"]["single"]["rounds"] != second["rounds"]


def test_other_settings_do_not_mix(engines: dict[str, Peer], path: Path) -> None:
    race.race(asked(path, repeat=1, peers="good"))
    with pytest.raises(ValueError, match=r"configurations \['taut:x', 'good:x'\] there"):
        race.race(asked(path))


def test_a_busy_machine_is_refused(
    engines: dict[str, Peer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy, "wait_until_quiet", lambda limit: 0.8)
    with pytest.raises(ValueError, match=r"other processes use 0.80 of .*--allow-busy"):
        race.race(asked(path, allow_busy=False))
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"regimes": "sprint"}, "'sprint' is no regime; they are single"),
        ({"repeat": 0}, "--repeat must be at least 1"),
        ({"peers": "ollama"}, "'ollama' is no peer; known are good, dies"),
        ({"peers": "good,good:x"}, "good:x is named twice"),
        ({"peers": "taut"}, "'taut' is no peer"),
        ({"peers": "good:y"}, "good has no configuration 'y'; it has x"),
        ({"taut": "y"}, "taut has no configuration 'y'"),
        ({"text": Path("nothing")}, "--text nothing: there is no such file"),
        ({"json": Path("/nowhere/at/all")}, "--json .*no folder"),
    ],
)
def test_refused_before_anything_runs(
    engines: dict[str, Peer], path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        race.race(asked(path, **changes))
    assert not path.exists()


def test_who_takes_part() -> None:
    every = configurations("llamacpp,transformers:f32,openvino:fp16")
    in_16_bits = [each.label for each in every if race.takes_part(each, REGIMES["single-bf16"])]
    assert in_16_bits == ["llamacpp:bf16", "llamacpp:bf16-bench", "openvino:fp16"]
    cold = [each.label for each in every if race.takes_part(each, REGIMES["cold"])]
    assert cold == [each.label for each in every if not each.label.endswith("-bench")]
    assert len(every) == len(llamacpp.PEER.chosen(None)) + 2


def test_tauts_configurations_are_options_of_a_model() -> None:
    """What a worker and a server get: names and values that the engine takes."""
    for each in taut.PEER.configurations:
        spec = ModelOptions(model="smollm2", **each.settings).config().models["main"]
        assert (each.bits == 4) == (spec.weights == "nvfp4")
        assert spec.activations == (each.name.partition("-")[2] or "float")
    in_4_bits = [each.label for each in configurations("nvfp4,nvfp4-int16,nvfp4-int8", only="taut")]
    usual = [each.label for each in taut.PEER.chosen(None)]
    assert usual == ["taut:bf16", *in_4_bits, "taut:int8"]
