"""The race of servers, with programs in the place of engines."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import race, race_serve
from bench.peers import servers, taut, vllm
from bench.peers.peer import Configuration, Job, Peer, PeerError
from bench.peers.serve_record import FIGURES, ratios
from bench.peers.servers import SERVERS, Command, ServerRunner
from tests.bench.peers.fakes import job

PROGRAM = [sys.executable, "-S", "-m", "tests.bench.peers.server_program"]


def peer(name: str, how: str) -> Peer:
    def runner(configuration: Configuration, job: Job) -> ServerRunner:
        return ServerRunner(Command(words=[*PROGRAM, how]), job)

    made = Configuration(peer=name, name="x", bits=4, files="file")
    return Peer(name=name, configurations=(made,), runner=runner)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "taut": peer("taut", "good"),
        "good": peer("good", "good"),
        "dies": peer("dies", "dies"),
        "short": peer("short", "short"),
    }
    monkeypatch.setattr(race_serve, "SERVERS", found)
    monkeypatch.setattr(race, "prepare", lambda model, racing: {"file": Path("model")})
    monkeypatch.setattr(race, "text_ids", lambda files, text: list(range(300)))
    monkeypatch.setattr(race, "environment", lambda: {"commit": "abc"})


def asked(path: Path, **changes: Any) -> Namespace:
    flags = ["--peers", "good,dies,short", "--allow-busy", "--json", str(path)]
    args = race_serve.arguments(["--taut", "x", *flags])
    sizes = {"clients": "1,3", "asks": 2, "repeat": 2, "output_len": 5, "input_len": 4}
    for name, value in {**sizes, "timeout": 20.0, **changes}.items():
        setattr(args, name, value)
    return args


def test_a_race(fakes: None, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    record = race_serve.run(asked(path))
    held = json.loads(path.read_text())["clients"]
    assert list(held) == ["1", "3"]
    for clients in (1, 3):
        part = held[str(clients)]
        assert part["rounds"] == record.rounds[clients]
        assert [set(made) >= {"taut:x", "good:x"} for made in part["rounds"]] == [True] * 2
        assert "made 4, not 4 and 5" in part["failures"]["short:x"]
        assert set(part["ratios"]["taut:x / good:x"]) == set(FIGURES)
        ratio = part["ratios"]["taut:x / good:x"]["output_throughput"]
        assert 0.05 < ratio["min"] <= ratio["median"] <= ratio["max"] < 20
    assert "out of memory" in held["3"]["failures"]["dies:x"]
    console = Console(width=160, record=True, file=(tmp_path / "shown").open("w"))
    console.print(race_serve.table(3, record.rounds[3]))
    console.file.close()
    shown = console.export_text()
    assert "taut:x / good:x" in shown
    assert "TTFT p99" in shown


def test_goes_on_after_an_interruption(
    fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "race.json"
    calls = iter([None, None, KeyboardInterrupt()])  # warming up, the first round, the second

    def quiet(args: Namespace) -> None:
        if (raised := next(calls, None)) is not None:
            raise raised

    monkeypatch.setattr(race, "be_quiet", quiet)
    with pytest.raises(KeyboardInterrupt):
        race_serve.run(asked(path, peers="good,short"))
    (first,) = json.loads(path.read_text())["clients"]["1"]["rounds"]
    record = race_serve.run(asked(path, peers="good,short"))
    assert [len(record.rounds[clients]) for clients in (1, 3)] == [2, 2]
    assert record.rounds[1][0] == first
    assert "short:x" in record.failures[1]

    finished = path.read_text()
    race_serve.run(asked(path, peers="good,short"))
    assert path.read_text() == finished  # nothing was left to do
    race_serve.run(asked(path, peers="good,short", again="1"))
    held = json.loads(path.read_text())["clients"]
    assert held["1"]["rounds"][0] != first
    assert held["3"]["rounds"] == record.rounds[3]
    with pytest.raises(ValueError, match=r"other settings.*asks 2 there, 3 now"):
        race_serve.run(asked(path, peers="good,short", asks=3))


def test_all_that_fail_end_a_race(fakes: None, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    record = race_serve.run(asked(path, taut="", peers="short", clients="1"))
    assert record.rounds == {1: []}
    assert list(record.failures[1]) == ["short:x"]


def test_a_record_of_another_kind_is_refused(fakes: None, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text('{"version": 1, "settings": {}, "regimes": {}}')
    with pytest.raises(ValueError, match="no record of a race"):
        race_serve.run(asked(path))


def test_ratios_are_of_one_round() -> None:
    def lap(value: float) -> dict[str, float]:
        return dict.fromkeys(FIGURES, value)

    rounds = [{"taut:x": lap(2), "a:x": lap(1)}, {"taut:x": lap(9), "a:x": lap(3)}]
    found = ratios([*rounds, {"taut:x": lap(5)}])
    assert found["taut:x / a:x"]["p99_itl_ms"] == {"min": 2.0, "median": 2.5, "max": 3.0}


@pytest.mark.parametrize("how", ["never", "no-such-program"])
def test_a_server_that_does_not_come(how: str, tmp_path: Path) -> None:
    words = [*PROGRAM, how] if how == "never" else [sys.executable, "-c", "exit('no model')"]
    runner = ServerRunner(Command(words=words), job(tmp_path, timeout=0.5))
    with pytest.raises(PeerError, match=r"not ready within 0.5 s|no model"):
        runner.start()
    runner.close()


@pytest.mark.parametrize("changes", [{"clients": "0"}, {"asks": 0}, {"peers": "openvino"}])
def test_refused(fakes: None, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|no peer"):
        race_serve.run(asked(tmp_path / "x", **changes))


def test_how_each_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = job(tmp_path, streams=8, threads=2)
    env: Mapping[str, str] = {}
    for name, words in {
        taut.NAME: ["engine.cli", "serve", "--max-num-seqs", "8", "--weights", "--kv-format"],
        "llamacpp": ["--parallel", "8", "--no-cache-prompt", "--threads", "2"],
        "vllm": ["--max-num-seqs", "8", "--no-enable-prefix-caching", "--max-model-len"],
    }.items():
        runner = SERVERS[name].runner(SERVERS[name].configurations[0], wanted)
        assert isinstance(runner, servers.ServerRunner)
        said = runner._command.words
        assert [word for word in words if word not in said] == []
        assert str(wanted.model) in said
        env = runner._command.env  # the last one's, vLLM's
    assert vllm.environment(wanted)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in env
