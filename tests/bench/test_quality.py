"""The command, end to end, on a tiny model that knows nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import compare, quality
from bench.evaluation.engine_backend import EngineBackend
from tests.engines import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prompts end with an opened thinking, which it never closes."""
    folder = write_model(tmp_path_factory.mktemp("model")).folder
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    settings["chat_template"] += "<think>"
    file.write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    lines = [{"id": f"p{i}", "question": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


class Command:
    """The command line of one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path, problems: Path) -> None:
        self._monkeypatch = monkeypatch
        self._base = ["--model", str(model), "--task", "gsm8k", "--problems", str(problems)]
        self._base += ["--max-tokens", "12"]

    def run(self, *options: object) -> None:
        self.exactly(*self._base, *options)

    def exactly(self, *options: object) -> None:
        self._monkeypatch.setattr("sys.argv", ["quality", *map(str, options)])
        quality.main()

    def refused(self, *options: object) -> str:
        with pytest.raises(SystemExit) as refusal:
            self.run(*options)
        assert isinstance(refusal.value.code, str)
        return refusal.value.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, model: Path, problems: Path) -> Command:
    return Command(monkeypatch, model, problems)


def read(path: Path) -> dict[str, Any]:
    (line,) = path.read_text(encoding="utf-8").splitlines()
    return dict(json.loads(line))


def digests(run: dict[str, Any]) -> dict[str, str]:
    return {sample["problem"]: sample["digest"] for sample in run["samples"]}


def test_a_run_a_second_one_and_their_comparison(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    command.run("--json", first, "--limit", 3)
    run = read(first)
    for key in ("accuracy", "accuracy_ci", "thinking_tokens_mean", "answer_tokens_mean"):
        assert key in run
    assert run["tokens_per_s"] > 0
    assert run["seconds_per_correct"] is None  # it knows nothing
    assert run["kv_byte_seconds"] > 0
    assert run["settings"]["max_tokens"] == 12
    assert run["environment"]["versions"]["torch"]
    assert run["environment"]["commit"]
    assert sorted(sample["problem"] for sample in run["samples"]) == ["p0", "p1", "p2"]
    report = tmp_path / "report.html"
    command.run("--json", second, "--vs", first, "--report", report, "--name", "again")
    assert digests(run).items() <= digests(read(second)).items()  # greedy: the same tokens
    assert "again beside" in report.read_text(encoding="utf-8")
    shown = capsys.readouterr()
    assert "1.00x" in shown.out
    assert "2 problems (p3, p4) only in again" in " ".join(shown.out.split())
    assert "gsm8k: 5/5" in shown.err
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".html", ".json", ".json", ".jsonl"]


def test_an_interrupted_run_goes_on(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole = tmp_path / "run.json", tmp_path / "whole.json"
    run = EngineBackend.run

    def interrupted(self: EngineBackend, asks: Any) -> Iterator[Any]:
        for count, made in enumerate(run(self, asks)):
            if count == 3:
                raise KeyboardInterrupt
            yield made

    options = ("--samples", 2, "--temperature", 0.7)
    with monkeypatch.context() as patch:
        patch.setattr(EngineBackend, "run", interrupted)
        assert "goes on from" in command.refused("--json", out, *options)
    assert not out.exists()
    assert "other settings" in command.refused("--json", out, *options, "--top-k", 5)
    command.run("--json", out, *options)
    command.run("--json", whole, *options)
    key = ("problem", "index", "seed", "digest")
    samples = [sorted([s[k] for k in key] for s in read(path)["samples"]) for path in (out, whole)]
    assert samples[0] == samples[1]
    assert read(out)["environment"]["resumed_samples"] == 3


def test_a_problem_that_cannot_be_asked_is_recorded(
    command: Command, problems: Path, tmp_path: Path
) -> None:
    long = {"id": "long", "question": "why? " * 3000, "answer": "1"}
    problems.write_text(json.dumps(long) + "\n" + problems.read_text(encoding="utf-8"))
    command.run("--json", tmp_path / "run.json")
    run = read(tmp_path / "run.json")
    assert run["errors"] == 1
    (crashed,) = (sample for sample in run["samples"] if sample["verdict"] == "error")
    assert crashed["problem"] == "long"
    assert "maximum context length" in crashed["error"]


def test_generated_problems_beside_read_ones(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    gym = ("--task", "reasoning-gym:chain_sum", "--limit", 2, "--limit", 1)
    command.run(*gym, "--json", out)
    tasks = read(out)["tasks"]
    assert list(tasks) == ["gsm8k", "reasoning-gym:chain_sum"]
    assert [task["problems"] for task in tasks.values()] == [2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--max-tokens", 0), "max_tokens must be at least 1"),
        (("--limit", 0), "limit must be at least 1"),
        (("--limit", 1, "--limit", 2), "2 --limit for 1 --task"),
        (("--samples", 3), "--samples 3 at --temperature 0 are all the same"),
        (("--task", "gsm8k"), "gsm8k is given twice"),
        (("--task", "gsm9k"), "there is no task 'gsm9k'"),
        (("--problems", "other.jsonl"), "no --task reads it"),
        (("--json", "no/folder/run.json"), "there is no folder"),
        (("--report", "no/folder/run.html"), "there is no folder"),
        (("--vs", "none.json"), "none.json"),
        (("--vs", __file__), "isn't a record of a run"),
        (("--report", "."), "is a folder"),
        (("--json", "one.html", "--report", "one.html"), "are one file"),
        (("--temperature", -1), "temperature must be"),
        (("--kv-policy", "snapkv"), "budget"),
        (("--weights", "rtn9"), "rtn9"),
    ],
)
def test_refused_before_anything_runs(
    command: Command,
    options: tuple[object, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quality, "measure", lambda *_: pytest.fail("it ran"))
    json_file = () if "--json" in options else ("--json", tmp_path / "run.json")
    assert message in command.refused(*json_file, *options)
    assert not (tmp_path / "run.json.partial").exists()


def test_a_base_that_shares_no_task_is_refused_before_anything_runs(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run.json"
    command.run("--json", out, "--limit", 1)
    monkeypatch.setattr(quality, "measure", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit, match="run has other tasks: gsm8k"):
        command.exactly("--task", "reasoning-gym:chain_sum", "--limit", 1, "--vs", out)


def test_a_run_of_failures_is_no_run(command: Command, problems: Path, tmp_path: Path) -> None:
    long = {"id": "long", "question": "why? " * 3000, "answer": "1"}
    problems.write_text(json.dumps(long), encoding="utf-8")
    out = tmp_path / "run.json"
    assert "every sample failed, the first with: " in command.refused("--json", out)
    assert not out.exists()


def test_finished_runs_are_compared_without_running(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run.json"
    command.run("--json", out)
    capsys.readouterr()
    report = tmp_path / "report.html"
    argv = ["compare", str(out), "--vs", str(out), "--report", str(report)]
    monkeypatch.setattr("sys.argv", argv)
    compare.main()
    assert "1.00x" in capsys.readouterr().out
    assert report.exists()
    monkeypatch.setattr("sys.argv", ["compare", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit, match=r"none.json"):
        compare.main()
