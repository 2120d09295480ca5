"""The grid on random weights: every run once, whoever makes it, and what the tables say of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kv_grid
from bench.abacus.export import write_folder
from bench.abacus.network import Network, Shape
from bench.abacus.train import VOCABULARY
from bench.evaluation.records import KVHeld, Usage
from bench.evaluation.store import Store
from bench.grid.folder import Result, digest_of, results
from bench.grid.points import ALLOCATIONS, FORMATS, POLICIES, Point, budget_of, points
from bench.grid.ranking import rank, rankings, read_off
from bench.grid.table import tables
from engine.cache.registry import policy_classes, policy_from_text
from tests.bench.samples import run_of, sample


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    network = Network(Shape(VOCABULARY, 2, 32, 64, 2, 1, 32))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp("random")
    write_folder(folder, network)
    return folder


def run(model: Path, out: Path, *options: object) -> None:
    asked = ["--model", model, "--limit", 2, "--max-tokens", 60, "--threads", 1, *options]
    kv_grid.main([*map(str, asked), "--out", str(out)])


SOME = ("--policies", "snapkv", "kara", "--budgets", "10%", "--length", 200)


def test_a_grid_and_its_tables(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, tmp_path, *SOME)
    told = capsys.readouterr().err
    assert "[15/15]" in told
    found = results(tmp_path)
    assert len(found) == 1 + 2 + len(ALLOCATIONS) + len(FORMATS) + 3
    for each in found:
        held = [one.kv for one in each.run.samples]
        assert all(kv is not None and kv.excess_cells <= 0 for kv in held)
    (kara,) = (each for each in found if each.method == "kara")
    assert (kara.budget, kara.cells) == ("10%", 20)
    assert kara.run.settings["kv_budget"] == 5
    (shared,) = (each for each in found if each.method == "snapkv + reasonalloc")
    assert len(shared.run.settings["kv_wave"]) == 2
    run(model, tmp_path, *SOME)  # nothing is left to do
    assert "15 runs, 15 of them done" in capsys.readouterr().err
    kv_grid.main(["--out", str(tmp_path), "--table"])
    shown = capsys.readouterr().out
    assert "### policies, 10% (20 cells a head)" in shown
    assert "| snapkv in int4 over snapkv in bf16 | 10% |" in shown
    assert "BROKEN" not in shown
    assert "### Ranked at what snapkv holds at 10%, on average" in shown


def test_two_at_once_share_the_work_and_killed_ones_go_on(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*SOME, "--parts", "policies")
    run(model, tmp_path, *options)
    kara = tmp_path / "kara-10pc.json"
    made = results(tmp_path)
    (before,) = (each.run for each in made if each.method == "kara")
    kara.unlink()
    with Store(kara, before.settings):  # another process
        run(model, tmp_path, *options)
        assert "kara, 10%: another process has it" in capsys.readouterr().err
    with Store(kara, before.settings) as store:  # it is killed after one sample
        store.add(before.samples[0], Usage(wall_seconds=1.0))
    run(model, tmp_path, *options)
    (after,) = (each.run for each in results(tmp_path) if each.method == "kara")
    assert after.environment["resumed_samples"] == 1
    assert sorted(s.digest or "" for s in after.samples) == sorted(
        s.digest or "" for s in before.samples
    )


def test_another_configuration_is_refused(model: Path, tmp_path: Path) -> None:
    options = (*SOME, "--parts", "policies", "--policies", "snapkv")
    run(model, tmp_path, *options)
    for changed, words in (
        (("--limit", 3), "tasks"),
        (("--seed", 9), "seed 1 there, 9 now"),
        (("--length", 300), "kv_budget 20 there, 30 now"),
    ):
        with pytest.raises(SystemExit, match=words):
            run(model, tmp_path, *options, *changed)
    weights = model / "model.safetensors"
    kept, digest = weights.read_bytes(), digest_of(model)
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    try:
        assert digest_of(model) != digest
        with pytest.raises(SystemExit, match="model_digest"):
            run(model, tmp_path, *options)
    finally:
        weights.write_bytes(kept)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--policies", "snap"), "no policy here is called snap"),
        (("--budgets", "much"), "a budget is cells, as 64, or a share"),
        (("--budgets", "3"), "at least 4 whole cells"),
        (("--budgets", "100%"), "below 100 %"),
        (("--limit", "0"), "limit must be at least 1"),
        (("--task", "gsm8k", "--budgets", "20%"), "give --length"),
        (("--task", "gsm8k", "--parts", "policies"), "kara keeps a share"),
    ],
)
def test_refused_before_anything_runs(
    model: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        run(model, tmp_path / "out", *options)
    assert not list((tmp_path / "out").glob("*.partial"))


def test_a_table_needs_runs(tmp_path: Path) -> None:
    for folder, words in ((tmp_path / "none", "no folder"), (tmp_path, "no run with the full")):
        with pytest.raises(SystemExit, match=words):
            kv_grid.main(["--out", str(folder), "--table"])


def test_every_point_is_one_that_the_engine_knows() -> None:
    budgets = [budget_of(text, 300) for text in ("10%", "20%", "40%", "256")]
    made = list(points(budgets, cell_bytes=1000, profile="x.json"))
    assert len({point.file for point in made}) == len(made)
    assert made[0] == Point("full", "full")
    for point in made:
        if point.policy is None:
            continue
        flags = dict(zip(point.flags[::2], point.flags[1::2], strict=True))
        policy = policy_from_text(flags["--kv-policy"])
        if "--kv-budget" in flags:
            budget, window = int(flags["--kv-budget"]), int(flags["--kv-window"])
            assert policy.refuses(budget, window) is None
    with pytest.raises(ValueError, match="kara"):
        list(points([budget_of("64", None)], cell_bytes=1, profile=""))


def test_budgets() -> None:
    share = budget_of("20%", 300)
    assert (share.cells, share.window, share.share) == (60, 30, 0.2)
    assert share.kara == (10, 48, 12)
    cells = budget_of("64", 400)
    assert (cells.cells, cells.share) == (64, 0.16)
    assert cells.kara == (10, 64, 16)
    assert budget_of("64", None).share is None


def result(
    method: str, cells: int | None, memory: float, right: int, part: str = "policies"
) -> Result:
    """Of ten problems, the first `right` of them right."""
    held = KVHeld(
        peak_cells=2 * int(memory),
        peak_bytes=2000,
        mean_cells=memory,
        mean_bytes=100 * memory,
        side_bytes=50 * int(memory) if method == "vase" else 0,
        excess_cells=0,
    )
    samples = [
        replace(sample(f"p{i}"), verdict="right" if i < right else "wrong", kv=held)
        for i in range(10)
    ]
    settings: dict[str, Any] = {"model": "tiny", "model_digest": "d", "tasks": {"sums": [10, "x"]}}
    label = None if cells is None else str(cells)
    return Result(part, method, label, cells, run_of(samples, method, **settings))


def test_ranked_at_equal_memory() -> None:
    found = [
        result("full", None, 400, 10, "full"),
        result("snapkv", 20, 100, 4),
        result("snapkv", 40, 200, 6),
        result("vase", 20, 100, 6),
        result("vase", 40, 200, 8),
        result("kara", 40, 150, 2),
    ]
    first, second = rankings(found)
    # vase's side state is half as much again: at 100 cells' bytes it hasn't begun
    assert "| vase 60.0 % | vase 60.0 % | snapkv 40.0 % |" in first
    assert "kara" not in first
    # and at 200's it is between its runs of 150 and 300
    assert "equal cells (200 cells) | equal KV bytes (20 kB) | equal all bytes (20 kB)" in second
    assert "| vase 80.0 % | vase 80.0 % | vase 68.3 % |" in second
    assert "| kara 43.5 % |" in second  # on the way to the full cache
    assert read_off([(100.0, 0.5)], 101.0) == read_off([(100.0, 0.5)], 98.5) == 0.5
    assert read_off([(100.0, 0.5)], 90.0) is None
    assert rank({"a": [(1.0, 0.2)], "b": [(1.0, 0.3)]}, 1.0) == ["b 30.0 %", "a 20.0 %"]


def test_claims_are_judged_by_pairs() -> None:
    found = [result("full", None, 400, 10, "full"), result("rkv", 20, 100, 9)]
    found += [result("snapkv", 20, 100, 0), result("vase", 20, 100, 8)]
    shown = tables(found)
    assert "| rkv over snapkv | 20 | +90.0" in shown
    assert "| +9 -0 | 0.004 | as claimed |" in shown
    assert "| vase over rkv | 20 | -10.0" in shown
    assert "| +0 -1 | 1.000 | undecided |" in shown
    broken = found[1]
    worse = [replace(s, kv=replace(s.kv, excess_cells=3)) for s in broken.run.samples if s.kv]
    found[1] = broken._replace(run=replace(broken.run, samples=tuple(worse)))
    assert "BROKEN by 3 cells" in tables(found)


def test_policies_are_all_there() -> None:
    said = {text.partition("(")[0] for text in POLICIES.values()}
    assert said == set(policy_classes())
