from __future__ import annotations

import io
import sys

import pytest

from bench.evaluation.live import Live
from tests.bench import synthetic


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_plain_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with Live() as view:
        view.begin("gsm8k", 40, 0)
        for i in range(39):
            view.show(synthetic.sample(i, "right" if i % 2 else "wrong"))
        view.show(synthetic.looping(39))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert "\x1b" not in err
    assert "\r" not in err
    assert lines[0] == "gsm8k: 40 samples"
    assert [line.split(",")[0] for line in lines[1:]] == [f"gsm8k: {n}/40" for n in range(4, 41, 4)]
    assert "accuracy 50.0 % (15.0 to 85.0 %), chain 406 tokens" in lines[1]
    assert "left" in lines[1]
    assert "left" not in lines[-1]
    assert "1 at limit, 1 looped, 0 crashed, 0 grader failed" in lines[-1]


def test_a_resumed_run_counts_what_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Live() as view:
        view.begin("aime", 10, 8)
        view.show(synthetic.sample(verdict="error", task="aime"))
        view.show(synthetic.sample(verdict="grader_error", task="aime"))
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "aime: 10 samples, 8 done earlier"
    assert [line.split(",")[0] for line in lines] == ["aime: 9/10", "aime: 10/10"]
    assert "accuracy n/a, chain n/a" in lines[0]
    assert "accuracy n/a, chain 350 tokens" in lines[1]
    assert "1 crashed, 1 grader failed" in lines[1]


def test_a_terminal_shows_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    terminal = sys.stderr
    with Live() as view:
        view.begin("[red]gsm8k", 4, 0)
        view.show(synthetic.sample(task="[red]gsm8k"))
        view.begin("aime", 3, 0)
        print("passes through")
    assert isinstance(terminal, Terminal)
    text = terminal.getvalue()
    assert "[red]gsm8k" in text
    assert "1/4" in text
    assert "0/3" in text
    assert "accuracy 100.0 % (20.7 to 100.0 %)" in text
    assert out.getvalue() == "passes through\n"
