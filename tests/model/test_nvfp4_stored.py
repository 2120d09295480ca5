"""Folders that other tools have quantised: both conventions, and every way in which one can lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.build import load_model
from engine.config import ModelSpec
from engine.kernels import nvfp4
from engine.kernels.nvfp4 import quantise
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.decoder import Decoder
from tests import oracle
from tests.model.test_decoder import alone, random_ids
from tests.tiny import TinyCheckpoint, tiny_checkpoint, write_folder

TOOLS = ("modelopt", "compressed-tensors")
DOWN = "model.layers.1.mlp.down_proj"

WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*o_proj"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    },
}


def stored_as(tool: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix in a tool's tensors, each with a tensor scale of its own; and its values."""
    q = quantise(weight)
    blocks = q.blocks.view(torch.float8_e4m3fn)
    values = nvfp4.decode_e4m3(q.blocks).repeat_interleave(16, 1).double()
    signed = torch.tensor([*nvfp4.MAGNITUDES, *(-m for m in nvfp4.MAGNITUDES)]).double()
    values *= signed[torch.stack((q.codes & 15, q.codes >> 4), -1).flatten(1).long()]
    if tool == "modelopt":
        scale = torch.tensor(q.scale)
        parts = {"weight": q.codes, "weight_scale": blocks, "weight_scale_2": scale}
    else:
        inverse = torch.tensor([q.inverse])
        parts = {"weight_packed": q.codes, "weight_scale": blocks, "weight_global_scale": inverse}
        scale = 1 / inverse
    tensors = {f"{name}.{part}": tensor for part, tensor in parts.items()}
    tensors[f"{name}.input_scale"] = torch.tensor(0.5)  # of activations that stay floats here
    return tensors, (values * scale.double()).float()


class Made:
    """A tiny model whose attention and MLP are quantised, all but the output projections."""

    def __init__(self, folder: Path, tool: str, skip: str = "o_proj") -> None:
        self.tiny: TinyCheckpoint = tiny_checkpoint("qwen2", intermediate_size=144)
        self.values: dict[str, Tensor] = {}
        self.folder = write_folder(folder, self.tiny.config, self.tiny.tensors)
        self.file = folder / "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.tiny.tensors.items():
            if name.endswith("_proj.weight") and skip not in name:
                made, self.values[name] = stored_as(tool, name.removesuffix(".weight"), tensor)
                tensors |= made
            else:
                tensors[name] = self.values[name] = tensor
        for layer in range(self.tiny.config.layers):
            for name in ("k_proj.k_scale", "v_proj.v_scale"):
                tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(1.0)
        save_file(tensors, self.file)
        self.configure(CONFIGS[tool])

    def configure(self, quantization: Any) -> None:
        file = self.folder / "config.json"
        config = json.loads(file.read_text()) | {"quantization_config": quantization}
        file.write_text(json.dumps(config))

    def change(self, change: Callable[[dict[str, Tensor]], object]) -> None:
        tensors = load_file(self.file)
        change(tensors)
        save_file(tensors, self.file)

    def open(self) -> Checkpoint:
        checkpoint = open_checkpoint(self.folder)
        checkpoint.check()
        return checkpoint

    def load(self, weights: str = "float") -> Decoder:
        spec = ModelSpec(str(self.folder), device="cpu", weights=weights)
        return load_model("main", spec, ()).decoder


@pytest.mark.parametrize("tool", TOOLS)
def test_matrices_have_the_formats_values_bit_for_bit(tool: str, tmp_path: Path) -> None:
    made = Made(tmp_path / "model", tool)
    checkpoint = made.open()
    assert checkpoint.stored_format == "nvfp4"
    packed = 0
    for name, values in made.values.items():
        shape = tuple(values.shape)
        parts = checkpoint.packed(name, shape)
        found = checkpoint.tensor(name, shape) if parts is None else parts.dense(torch.float32)
        packed += parts is not None
        assert torch.equal(found, values), name
    assert packed == 2 * 6


@pytest.mark.parametrize("tool", TOOLS)
def test_the_model_runs_as_it_is_stored(tool: str, tmp_path: Path) -> None:
    """q, k and v have different tensor scales; o_proj is a float matrix."""
    made = Made(tmp_path / "model", tool)
    ids = random_ids(20)
    decoder = made.load()
    truth = oracle.logits(made.tiny.config, made.values, ids)
    torch.testing.assert_close(alone(decoder, ids), truth, rtol=1e-4, atol=1e-4)
    plain = Decoder.load(made.tiny, dtype=torch.float32, device="cpu")
    assert decoder.nbytes < 0.6 * plain.nbytes  # the embedding and o_proj are most of it
    assert made.load("nvfp4").nbytes < 0.6 * decoder.nbytes, "head and o_proj are quantised too"


def test_some_of_a_fused_group_in_floats(tmp_path: Path) -> None:
    made = Made(tmp_path / "model", "modelopt", skip="v_proj")
    ids = random_ids(20)
    truth = oracle.logits(made.tiny.config, made.values, ids)
    torch.testing.assert_close(alone(made.load(), ids), truth, rtol=1e-4, atol=1e-4)


def test_an_older_modelopt_folder_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    made = Made(tmp_path / "model", "modelopt")
    made.configure(None)
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    file = made.folder / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    assert made.open().stored_format == "nvfp4"
    file.write_text(json.dumps({"quantization": quantization | {"quant_algo": "NVFP4_AWQ"}}))
    with pytest.raises(ValueError, match=r"hf_quant_config.json: .* quant_algo 'NVFP4_AWQ'; supp"):
        made.open()


@pytest.mark.parametrize("weights", ["int8", "bf16", "rtn4"])
def test_it_is_not_quantised_twice(weights: str, tmp_path: Path) -> None:
    made = Made(tmp_path / "model", "modelopt")
    with pytest.raises(ValueError, match=f"weights must be float .* or nvfp4 .*, not {weights}"):
        made.load(weights)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_other_tools_convention_is_seen(tool: str, tmp_path: Path) -> None:
    """As if a scale had been written to multiply where readers divide, or the other way round."""
    made = Made(tmp_path / "model", tool)
    scale = {"modelopt": "weight_scale_2", "compressed-tensors": "weight_global_scale"}[tool]

    def invert(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.{scale}"].reciprocal_()

    made.change(invert)
    with pytest.raises(ValueError, match=rf"tensor {DOWN}.{scale} is .* weights would reach"):
        made.load()


def put(part: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensor = tensors[f"{DOWN}.{part}"].float()
        tensor.view(-1)[-1] = value
        tensors[f"{DOWN}.{part}"] = tensor.to(tensors[f"{DOWN}.{part}"].dtype)

    return change


TAMPERED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no codes": (
        lambda t: t.pop(f"{DOWN}.weight_packed"),
        f"tensor {DOWN}.weight_packed is missing",
    ),
    "no block scales": (
        lambda t: t.pop(f"{DOWN}.weight_scale"),
        f"tensor {DOWN}.weight_scale is missing",
    ),
    "no tensor scale": (
        lambda t: t.pop(f"{DOWN}.weight_global_scale"),
        f"tensor {DOWN}.weight_global_scale is missing",
    ),
    "codes of another type": (
        lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"].int()}),
        f"tensor {DOWN}.weight_packed is of type I32; supported: U8",
    ),
    "scales of another type": (
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"].float()}),
        f"tensor {DOWN}.weight_scale is of type F32; supported: F8_E4M3",
    ),
    "too few blocks": (
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][:, 1:].clone()}),
        rf"tensor {DOWN}.weight_scale has shape \[64, 8\], .* needs \[64, 9\]",
    ),
    "two tensor scales": (
        lambda t: t.update({f"{DOWN}.weight_global_scale": torch.ones(2)}),
        rf"tensor {DOWN}.weight_global_scale has shape \[2\]",
    ),
    "a negative block scale": (
        put("weight_scale", -1.0),
        f"tensor {DOWN}.weight_scale holds negative values or NaN",
    ),
    "a block scale of NaN": (
        put("weight_scale", float("nan")),
        f"tensor {DOWN}.weight_scale holds negative values or NaN",
    ),
    "a tensor scale of NaN": (
        put("weight_global_scale", float("nan")),
        f"tensor {DOWN}.weight_global_scale is nan",
    ),
    "a tensor scale of 0": (
        put("weight_global_scale", 0.0),
        f"tensor {DOWN}.weight_global_scale is 0",
    ),
    "a scale of inputs": (
        lambda t: t.update({f"{DOWN}.pre_quant_scale": torch.ones(144)}),
        f"tensor {DOWN}.pre_quant_scale is not part of the architecture",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_folders_are_refused_with_the_tensors_name(what: str, tmp_path: Path) -> None:
    made = Made(tmp_path / "model", "compressed-tensors")
    change, words = TAMPERED[what]
    made.change(change)
    with pytest.raises(ValueError, match=words):
        made.load()


def group(**changes: Any) -> dict[str, Any]:
    weights = {"weights": {**WEIGHTS, **changes}}
    return {**CONFIGS["compressed-tensors"], "config_groups": {"group_0": weights}}


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        (CONFIGS["modelopt"] | {"quant_algo": "NVFP4_AWQ"}, "quant_algo 'NVFP4_AWQ'"),
        (CONFIGS["modelopt"] | {"quant_algo": "W4A8_NVFP4_FP8"}, "quant_algo 'W4A8_NVFP4_FP8'"),
        (CONFIGS["modelopt"] | {"group_size": 32}, "group_size 32"),
        (CONFIGS["compressed-tensors"] | {"format": "mixed-precision"}, "format 'mixed-precision'"),
        (CONFIGS["compressed-tensors"] | {"transform_config": {"a": 1}}, "a transform_config"),
        (CONFIGS["compressed-tensors"] | {"config_groups": {}}, "no config_groups"),
        (group(num_bits=8), r"weights of num_bits 8 \(group_0\)"),
        (group(group_size=32), r"weights of group_size 32 \(group_0\)"),
        (group(symmetric=False), r"weights with zero points \(group_0\)"),
    ],
)
def test_other_formats_are_refused_with_what_is_supported(
    quantization: dict[str, Any], words: str, tmp_path: Path
) -> None:
    tiny = tiny_checkpoint("qwen2")
    folder = write_folder(tmp_path / "model", tiny.config, tiny.tensors)
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    with pytest.raises(ValueError, match=rf"config.json: a quantised .* {words}; supported are NV"):
        open_checkpoint(folder)
