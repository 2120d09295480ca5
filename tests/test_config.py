"""What a config refuses: in words, with the field's name, before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from engine.build import device_of, markers_for
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from engine.config import EngineConfig, ModelSpec, ReasoningSpec
from engine.engine import Engine
from engine.request import SamplingParams
from engine.scheduler.controller import Controller, Watch
from engine.scheduler.controllers.alternate import Alternate
from tests.scripted import tiny_folder

MODELS = {"main": ModelSpec("smollm2")}


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(**({"models": MODELS} | fields))


@dataclass(frozen=True)
class Probing(Controller):
    """What a controller with a probe will look like."""

    probe: object = "layer 12"

    def watch(self) -> Watch:
        return Watch()


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: config(models={}), r'models must name a "main" role.*ModelSpec\("smollm2"\)'),
    (lambda: config(models={"helper": ModelSpec("a")}), 'models must name a "main" role'),
    (lambda: config(models=ModelSpec("a")), 'models must name a "main" role'),
    (lambda: config(models={"main": "smollm2"}), r"models\['main'\].*ModelSpec\('smollm2'\)"),
    (lambda: config(kv_bytes=0), "kv_bytes must be a positive integer, not 0"),
    (lambda: config(kv_bytes=1e9), "kv_bytes must be a positive integer"),
    (lambda: config(max_model_len=-1), "max_model_len must be a positive integer, not -1"),
    (lambda: config(threads=True), "threads must be a positive integer, not True"),
    (lambda: config(max_num_seqs=None), "max_num_seqs must be a positive integer, not None"),
    (lambda: config(max_batched_tokens=100), r"max_batched_tokens \(100\).*max_num_seqs \(64\)"),
    (lambda: config(controllers=("OSPruner",)), "controllers must hold Controller values"),
    (lambda: config(controllers=(Alternate(),)), r"Alternate uses the roles \['helper'\]"),
    (lambda: config(controllers=(Probing(),)), "Probing asks for a probe.*isn't supported yet"),
    (lambda: Alternate(every=0), "every must be at least 1, not 0"),
    (lambda: ModelSpec("a", dtype="int8"), "dtype must be auto, float32 or bfloat16, not 'int8'"),  # type: ignore[arg-type]
    (lambda: ModelSpec("a", weights="int4"), "weights must be one of float, bf16.* not 'int4'"),
    (lambda: ModelSpec("a", activations="int4"), "activations must be one of float, int16, int8"),
    (lambda: ModelSpec("a", weights=4), "weights must be one of float, bf16.* not 4"),  # type: ignore[arg-type]
    (lambda: ModelSpec("a", kv="int4"), "kv must be a KVSpec, not 'int4'"),  # type: ignore[arg-type]
    (lambda: device_of("tpu"), "device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
    (lambda: device_of("cuda:x"), "device must be auto"),
    (lambda: device_of("cuda:99"), "device 'cuda:99': torch sees"),
    (lambda: ReasoningSpec(start="<think>"), "reasoning.start and reasoning.end"),
    (lambda: ReasoningSpec(start="", end=""), "reasoning.start must be text"),
    (lambda: ReasoningSpec(closing=" "), "reasoning.closing must be text"),
    (lambda: KVSpec(format="int3"), "format must be one of auto, fp32, .* not 'int3'"),  # type: ignore[arg-type]
    (lambda: KVSpec(format="int4", tail_format="int8"), "tail_format must be auto, fp32 or bf16"),  # type: ignore[arg-type]
    (lambda: KVSpec(format="int4", tail_tokens=-1), "tail_tokens must be at least 0, not -1"),
    (lambda: KVSpec(budget_bytes=64), "budget_bytes=64 needs a policy"),
    (lambda: KVSpec(policy=SnapKV(), budget_tokens=64, budget_bytes=64), "not both"),
    (lambda: KVSpec(policy=SnapKV(), budget_bytes=0), "budget_bytes must be at least 1, not 0"),
    (lambda: KVSpec(policy="snapkv", budget_tokens=64), "policy must be a KVPolicy"),  # type: ignore[arg-type]
    (lambda: KVSpec(budget_tokens=64), "budget_tokens=64 needs a policy"),
    (lambda: KVSpec(policy=SnapKV()), "budget_tokens must be at least 4 with a policy, not None"),
    (lambda: KVSpec(policy=SnapKV(), budget_tokens=3), "budget_tokens must be at least 4"),
    (lambda: KVSpec(policy=SnapKV(), budget_tokens="64"), "budget_tokens must be at least 4"),  # type: ignore[arg-type]
    (lambda: KVSpec(policy=SnapKV(), budget_tokens=64, window=0), "window must be at least 1"),
    (lambda: KVSpec(policy=SnapKV(sinks=60), budget_tokens=64), "60 sinks and 8 recent cells"),
    (lambda: SamplingParams(temperature="ReSET"), "temperature must be a number"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_refused_in_words(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ModelSpec, "temperature"),  # temperature policies
        (ModelSpec, "pruning"),  # neuron masks
        (ModelSpec, "transcript"),
    ],
)
def test_what_does_not_exist_is_no_field(kind: Callable[..., object], field: str) -> None:
    with pytest.raises(TypeError, match=field):
        kind(**{field: 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize(
    ("spec", "fields", "words"),
    [
        ({}, {"max_model_len": 513}, r"max_model_len \(513\) is above the model's own 512"),
        ({}, {"kv_bytes": 1000}, r"kv_bytes \(1000\) is too small.*one sequence of 512 tokens"),
        ({"device": "tpu"}, {}, "device must be"),
        ({}, {"backends": ("rocket",)}, "rocket"),
    ],
)
def test_refused_by_the_engine(
    folder: str, spec: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(EngineConfig(models={"main": ModelSpec(folder, **spec)}, threads=1, **fields))


def test_the_closing_ends_with_the_marker_s_own_ids(folder: str) -> None:
    with Engine(EngineConfig(models={"main": ModelSpec(folder)}, threads=1)) as engine:
        tokenizer = engine.tokenizer
        for closing in ("Enough.", "Enough.</think>", "Enough.</think>\n\n", "</think>"):
            spec = ReasoningSpec(start="<think>", end="</think>", closing=closing)
            markers = markers_for(spec, tokenizer)
            assert markers.closing[-1:] == markers.end
            assert tokenizer.decode(markers.closing).count("</think>") == 1
        assert markers_for(ReasoningSpec(closing="So: "), tokenizer).end == ()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ModelSpec(5), "model"),  # type: ignore[arg-type]
        (lambda: ModelSpec("x", device=5), "device"),  # type: ignore[arg-type]
        (lambda: ModelSpec("x", reasoning="y"), "reasoning"),  # type: ignore[arg-type]
        (lambda: config(controllers=5), "controllers"),
        (lambda: config(backends="onednn"), "backends"),
        (lambda: config(seed=[]), "seed"),
    ],
)
def test_wrong_types_name_the_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be"):
        make()
