from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers.peer import PeerError
from bench.peers.process import Group
from bench.peers.worker import WorkerRunner
from tests.bench.peers.fakes import job

COMMAND = [sys.executable, "-S", "-m", "tests.bench.peers.worker"]
Start = Callable[..., WorkerRunner]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Start]:
    made: list[WorkerRunner] = []

    def runner(timeout: float = 60.0, **settings: Any) -> WorkerRunner:
        made.append(WorkerRunner(COMMAND, job(tmp_path, timeout=timeout), settings))
        return made[-1]

    yield runner
    for each in made:
        each.close()


def group_of(runner: WorkerRunner) -> Group:
    assert runner._group is not None
    return runner._group


def states(group: Group) -> list[str]:
    return [fields[0] for fields in group.members().values()]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_calls_and_answers(make: Start, tmp_path: Path) -> None:
    runner = make()
    runner.start()
    assert runner.about == {"versions": {"fake": "1"}, "flags": {"streams": 2}}
    timing = runner.generate([[7, 8, 9], [1, 2, 3]], 4)
    assert timing.tokens == (7, 8, 9, 10)
    assert timing.seconds > 0
    assert timing.first_seconds is None
    assert runner.peak_bytes() > 1 << 20
    assert "chats" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dies": 0}, r"died \(status 3\) when asked to load its model.*out of luck"),
        ({"refuses": 0}, "could not load its model: ValueError: no such weights"),
        ({"dies": 1}, r"died \(status 3\) when asked to run 1 prompts.*out of luck"),
        ({"refuses": 1}, "could not run 1 prompts to 5 tokens each: ValueError: no such weights"),
        ({"short": 1}, r"1 prompts gave 1 outputs of \[4\] tokens instead of 5 each"),
    ],
)
def test_failures_are_told(make: Start, settings: dict[str, int], words: str) -> None:
    runner = make(**settings)

    def work() -> None:
        runner.start()
        runner.generate([[1]], 5)

    with pytest.raises(PeerError, match=words):
        work()


def test_a_hang_ends(make: Start) -> None:
    runner = make(hangs=1)
    runner.start()
    runner._job = job(Path(), timeout=0.05, log=runner._job.log)
    with pytest.raises(PeerError, match=r"did not run 1 prompts .* within 0.05 s.*chats"):
        runner.generate([[1]], 5)


def test_stopped_and_continued_with_its_children(make: Start) -> None:
    runner = make(child=True)
    runner.start()
    group = group_of(runner)
    wait_for(lambda: len(group.members()) == 2)
    runner.pause()
    wait_for(lambda: states(group) == ["T", "T"])
    before = runner.cpu_seconds()
    assert runner.cpu_seconds() == before
    runner.resume()
    assert runner.generate([[5]], 1).tokens == (5,)
    assert "T" not in states(group)


@pytest.mark.parametrize("paused", [False, True])
def test_nothing_stays_behind(make: Start, paused: bool) -> None:
    runner = make(child=True)
    runner.start()
    group = group_of(runner)
    wait_for(lambda: len(group.members()) == 2)
    if paused:
        runner.pause()
    runner.close()
    wait_for(lambda: not group.members())
    with pytest.raises(PeerError, match="isn't running"):
        runner.peak_bytes()
