"""Memory-time: what is held through each step, by hand."""

from pathlib import Path

from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policy import KVSpec
from engine.metrics import MemoryMeter, MemoryTime
from tests.engines import greedy, open_engine, write_model

PAGE = 16


def test_sums_over_steps_and_seconds() -> None:
    meter = MemoryMeter()
    meter.count(100, 10, 2.0)
    meter.count(0, 0, 5.0)
    meter.count(300, 10, 0.5)
    assert meter.total == MemoryTime(3, 7.5, 420, 220.0 + 155.0, 20.0 + 5.0, peak_bytes=310)
    meter.reset_peak()
    meter.count(1, 1, 1.0)
    assert meter.total.peak_bytes == 2


def test_an_engine_counts_what_each_step_holds(tmp_path: Path) -> None:
    with open_engine(write_model(tmp_path)) as engine:
        prompt, new = list(range(1, 21)), 40
        page = engine.stats().kv["main"].page_bytes
        shape = engine.models["main"].shape
        engine.generate(prompt, greedy(new), progress=False)
        time, kv = engine.stats().kv_time["main"], engine.stats().kv["main"]
        # step s runs with 20 + s cells a head, the first of them the prompt
        cells = [len(prompt) + step for step in range(new)]
        pages = sum(-(-held // PAGE) for held in cells) * shape.layers * shape.kv_heads
        side = kv.side_bytes // engine.config.max_num_seqs
        assert time.steps == new
        assert time.byte_steps == pages * page + new * side
        assert 0 < time.side_byte_seconds < time.byte_seconds
        assert kv.used_side_bytes == 0


def test_a_bounded_cache_takes_less(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    taken = []
    for kv in (KVSpec(), KVSpec(policy=SinksRecent(), budget_tokens=16, window=16)):
        with open_engine(model, kv=kv) as engine:
            engine.generate([list(range(1, 40))], greedy(200), progress=False)
            taken.append(engine.stats().kv_time["main"].byte_steps)
    assert taken[1] < 0.5 * taken[0]


def test_peaks_can_be_counted_anew(tmp_path: Path) -> None:
    with open_engine(write_model(tmp_path)) as engine:
        engine.generate([[1] * 100], greedy(2), progress=False)
        high = engine.stats().kv_time["main"].peak_bytes
        assert high >= engine.stats().kv["main"].peak_bytes  # of cells alone
        engine.reset_peaks()
        assert engine.stats().kv_time["main"].peak_bytes == 0
        engine.generate([[2] * 10], greedy(2), progress=False)
        assert 0 < engine.stats().kv_time["main"].peak_bytes < high
