"""The profile of a model's layers: against attention written out, and from command to engine."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, KVSpec, ModelSpec
from engine.cache.allocations.reasonalloc import ReasonAlloc, read_wave, wave_file
from engine.cache.policies.rkv import RKV
from engine.cache.wave import WaveKV, cells_for
from engine.calibrate.kv_wave import calibrate, measure, read_prompts
from engine.model.checkpoint import open_checkpoint
from tests import oracle
from tests.engines import Model, greedy, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return write_model(tmp_path_factory.mktemp("wave") / "tiny")


def test_cells_for_by_hand() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.25] * 4, [0.0, 0.0, 1.0, 0.0]])
    assert cells_for(weights, 0.6).tolist() == [2, 3, 1]
    assert int(cells_for(torch.tensor([0.5, 0.3, 0.1]), 0.95)) == 3  # rounding lost the rest


def test_a_layers_demand_is_counted_query_by_query() -> None:
    noise = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(20, heads, 8, generator=noise) for heads in (4, 2, 2))
    wave = WaveKV(3, 0.93)
    out = wave.attend(1, q, k, v)
    counts = []
    for t in range(20):
        for head in range(4):
            logits = [float(q[t, head] @ k[i, head // 2]) / math.sqrt(8) for i in range(t + 1)]
            weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
            expected = (weights @ v[: t + 1, head // 2].double()).float()
            torch.testing.assert_close(out[t, head], expected, atol=1e-5, rtol=1e-5)
            mass, used = 0.0, 0
            for weight in sorted(weights.tolist(), reverse=True):
                mass, used = mass + weight, used + 1
                if mass >= 0.93:
                    break
            counts.append(used)
    assert wave.demand == [0.0, pytest.approx(sum(counts) / len(counts)), 0.0]


def test_measuring_runs_the_model_itself(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers attend with is the model's: its output under the measuring cache is right."""
    seen = []
    attend = WaveKV.attend

    def listening(self: WaveKV, layer: int, *qkv: torch.Tensor) -> torch.Tensor:
        seen.append(attend(self, layer, *qkv))
        return seen[-1]

    monkeypatch.setattr(WaveKV, "attend", listening)
    text = "One and one make two."
    demand = measure(ModelSpec(str(model.folder)), [text])
    assert len(demand) == len(seen) == model.config.layers
    assert all(1 <= each <= seen[0].shape[0] for each in demand)
    from engine import build
    from engine.model.decoder import StepContext

    loaded = build.load_model("main", ModelSpec(str(model.folder)), ("reference",))
    ids = loaded.tokenizer.encode(text)
    with torch.inference_mode():
        wave = WaveKV(model.config.layers, 0.93)
        hidden = loaded.decoder.forward(
            torch.tensor(ids), StepContext(torch.arange(len(ids)), wave)
        )
        got = loaded.decoder.logits(hidden)
    truth = oracle.logits(model.config, model.tensors, torch.tensor(ids))
    assert (got - truth).abs().max() <= 1e-4
    assert wave.demand == demand


def test_a_profile_reaches_the_engine(model: Model) -> None:
    spec = ModelSpec(str(model.folder))
    kv = KVSpec(policy=RKV(), budget_tokens=32, window=16, allocation=ReasonAlloc())
    config = EngineConfig(
        models={"main": ModelSpec(str(model.folder), kv=kv)},
        kv_bytes=8_000_000,
        max_model_len=256,
        threads=1,
    )
    with pytest.raises(ValueError, match=r"tiny\.kv-wave\.json: write it with `taut calibrate"):
        Engine(config)
    file = calibrate(spec, None, 0.93, None)
    assert (
        file
        == wave_file(open_checkpoint(model.folder).path)
        == model.folder.parent / ("tiny.kv-wave.json")
    )
    profile = json.loads(file.read_text())
    assert profile["prompts"] == 8
    assert read_wave(file) == tuple(profile["demand"])
    assert read_wave(file) == tuple(measure(spec, read_prompts(None)))
    with Engine(config) as engine:
        (output,) = engine.generate([[5, 6, 7] * 20], greedy(60))
        assert len(output.token_ids) == 60
        assert engine.stats().kv["main"].evicted_cells > 0


def test_what_cannot_be_measured_is_refused(model: Model, tmp_path: Path) -> None:
    spec = ModelSpec(str(model.folder))
    file = tmp_path / "prompts.json"
    for text, words in (("{", "isn't JSON"), ('{"a": 1}', "must be a JSON list")):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            calibrate(spec, file, 0.93, None)
    unfit: list[Any] = [[], [""], [3]]
    for prompts in unfit:
        with pytest.raises(ValueError, match="calibration prompts must be"):
            measure(spec, prompts)
    with pytest.raises(ValueError, match="coverage must be between 0 and 1, not 1"):
        measure(spec, ["x"], 1.0)
    with pytest.raises(ValueError, match="name another file with --out"):
        calibrate(spec, None, 0.93, tmp_path / "none" / "x.json")


def test_an_allocation_needs_a_policy() -> None:
    with pytest.raises(ValueError, match=r"allocation ReasonAlloc.* needs a policy"):
        KVSpec(allocation=ReasonAlloc())
