from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from bench.peers import busy


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Of the wall, the machine and our own processes."""
    now = {"wall": 100.0, "machine": 50.0, "ours": 5.0, "living": 1.0}
    monkeypatch.setattr(busy, "time", SimpleNamespace(perf_counter=lambda: now["wall"]))
    monkeypatch.setattr(busy, "_machine_seconds", lambda: now["machine"])
    monkeypatch.setattr(busy, "_our_seconds", lambda: now["ours"])
    return now


def pass_(clocks: dict[str, float], **seconds: float) -> None:
    for name, more in seconds.items():
        clocks[name] += more


def test_what_is_not_ours_is_the_others(clocks: dict[str, float]) -> None:
    meter = busy.Meter(lambda: clocks["living"])
    pass_(clocks, wall=10, machine=18, ours=1, living=12)
    assert meter.others_cpus() == pytest.approx(0.5)


def test_a_child_that_ended_meanwhile_counts_once(clocks: dict[str, float]) -> None:
    pass_(clocks, living=30)
    meter = busy.Meter(lambda: clocks["living"])
    pass_(clocks, wall=10, machine=12, ours=31 + 10)  # reaped with all that it ever used
    clocks["living"] = 0.0
    assert meter.others_cpus() == pytest.approx(0.2)


def test_never_less_than_nothing_and_nothing_of_an_instant(clocks: dict[str, float]) -> None:
    meter = busy.Meter(lambda: clocks["living"])
    pass_(clocks, wall=0.2, machine=0.4)
    assert meter.others_cpus() is None
    pass_(clocks, wall=1, ours=5)
    assert meter.others_cpus() == 0.0


def test_the_machine_and_this_process_can_be_read() -> None:
    assert busy._machine_seconds() >= 0
    assert busy._our_seconds() > 0


@pytest.mark.parametrize(
    ("loads", "limit", "left"), [([0.05], 0, 0.05), ([1, 0.5, 0.01], 9, 0.01), ([1, 2, 0], 2, 2)]
)
def test_waits_for_the_others(loads: list[float], limit: int, left: float) -> None:
    now = 0

    def measured() -> Iterator[float]:
        nonlocal now
        for load in loads:
            now += 1
            yield load

    each = measured()
    assert busy.wait_until_quiet(limit, lambda: next(each), lambda: now) == left
