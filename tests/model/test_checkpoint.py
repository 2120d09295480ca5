"""Hugging Face folders: config by family, defaults, shards, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.architecture import RopeConfig
from engine.model.checkpoint import open_checkpoint
from engine.model.hf_config import read_config
from engine.model.tensors import tensor_shapes

TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}


def write_config(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return folder


def weights(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(read_config(folder))
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def write_folder(folder: Path, **changes: Any) -> dict[str, Tensor]:
    held = weights(write_config(folder, **changes))
    save_file(held, folder / "model.safetensors")
    return held


def write_shards(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    held = weights(write_config(folder), dtype)
    index: dict[str, str] = {}
    for i in range(2):
        shard = {name: held[name] for name in sorted(held)[i::2]}
        save_file(shard, folder / f"model-{i}.safetensors")
        index |= dict.fromkeys(shard, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return held


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"qkv_bias": False, "out_bias": False, "qk_norm": False, "head_dim": 16}),
        ({"attention_bias": True}, {"qkv_bias": True, "out_bias": True}),
        ({"model_type": "qwen2"}, {"qkv_bias": True, "out_bias": False, "qk_norm": False}),
        ({"model_type": "qwen2", "head_dim": None}, {"head_dim": 8}),
        ({"model_type": "qwen3", "head_dim": None}, {"qk_norm": True, "head_dim": 128}),
        ({"model_type": "mistral", "sliding_window": None}, {"qkv_bias": False, "kv_heads": 2}),
        ({"model_type": "mistral", "sliding_window": 64}, {"family": "mistral"}),
        ({"num_key_value_heads": None, "tie_word_embeddings": True}, {"kv_heads": 4}),
    ],
)
def test_families_open_whole(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    held = write_folder(tmp_path, **changes)
    found = open_checkpoint(tmp_path)
    found.check()
    assert {key: getattr(found.config, key) for key in expected} == expected
    assert found.folder == tmp_path
    assert found.metadata is None
    for name, value in held.items():
        assert torch.equal(found.tensor(name, tuple(value.shape)), value)
        assert found.tensor(name, tuple(value.shape)).dtype == torch.bfloat16


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeConfig(theta=1e6)),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig(theta=1e6, kind="linear", factor=2.0),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            RopeConfig(kind="dynamic", factor=2.0, original_max_positions=64),
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeConfig(kind="llama3", factor=8.0, original_max_positions=32),
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 16,
                    "mscale": 0.7,
                    "truncate": False,
                }
            },
            RopeConfig(
                theta=1e6,
                kind="yarn",
                factor=4.0,
                original_max_positions=16,
                beta_fast=16.0,
                mscale=0.7,
                truncate=False,
            ),
        ),
    ],
)
def test_rope_scalings_old_and_new(
    tmp_path: Path, changes: dict[str, Any], rope: RopeConfig
) -> None:
    assert read_config(write_config(tmp_path, **changes)).rope == rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
        ({"mlp_bias": True}, "bias in the MLP"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding-window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 2}, "sliding-window"),
        ({"model_type": "mistral", "sliding_window": 32}, "sliding_window=32"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoint"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor must be a number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, not None"),
        ({"num_key_value_heads": 3}, "divide evenly"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
    ],
)
def test_refusals_name_the_file_and_the_reason(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=words) as e:
        open_checkpoint(tmp_path)
    assert "config.json" in str(e.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_shards_and_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    held = write_shards(tmp_path, dtype)
    found = open_checkpoint(tmp_path)
    found.check()
    for name, value in held.items():
        assert torch.equal(found.tensor(name, tuple(value.shape)), value)
    ids = torch.tensor([5, 0, 5])
    rows = found.rows("model.embed_tokens.weight", (40, 32))
    assert torch.equal(rows(ids), held["model.embed_tokens.weight"][ids])


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    write_folder(tmp_path)
    found = open_checkpoint(tmp_path)
    first, again = (found.tensor("model.norm.weight", (32,)) for _ in range(2))
    assert first.data_ptr() == again.data_ptr()


def test_damage_is_named(tmp_path: Path) -> None:
    held = write_shards(tmp_path)
    shard = tmp_path / "model-1.safetensors"
    whole = shard.read_bytes()

    shard.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=r"model-1\.safetensors: damaged or truncated"):
        open_checkpoint(tmp_path)
    shard.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"model-1\.safetensors: damaged or truncated"):
        open_checkpoint(tmp_path)
    lost, *kept = sorted(held)[1::2]
    save_file({name: held[name] for name in kept}, shard)
    with pytest.raises(ValueError, match=rf"model-1\.safetensors: tensor {lost} is missing"):
        open_checkpoint(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors: this file of weights is missing"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere"}}))
    with pytest.raises(ValueError, match=r"index\.json: '\.\./elsewhere'"):
        open_checkpoint(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: can't be read"):
        open_checkpoint(tmp_path)


def test_check_names_missing_surplus_and_misshapen_tensors(tmp_path: Path) -> None:
    held = write_folder(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"

    save_file({n: v for n, v in held.items() if n != name}, file)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_checkpoint(tmp_path).check()
    save_file({**held, name: torch.zeros(48, 31)}, file)
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor {name} has shape \[48, 31"):
        open_checkpoint(tmp_path).check()
    save_file({**held, name: torch.zeros(48, 32, dtype=torch.int8)}, file)
    with pytest.raises(ValueError, match=f"{name} is of type I8"):
        open_checkpoint(tmp_path).check()
    save_file({**held, "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file)
    with pytest.raises(ValueError, match=r"q_proj\.bias is not part of the architecture"):
        open_checkpoint(tmp_path).check()


def test_an_absurd_number_of_layers_is_refused_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path)
    write_config(tmp_path, num_hidden_layers=1 << 40)
    with pytest.raises(ValueError, match=r"holds 21 tensors, too few for the 1099511627776"):
        open_checkpoint(tmp_path).check()


def test_old_extras_are_no_surplus(tmp_path: Path) -> None:
    held = write_folder(tmp_path, tie_word_embeddings=True)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(held, tmp_path / "model.safetensors")
    open_checkpoint(tmp_path).check()


def test_generation_defaults(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert open_checkpoint(tmp_path).generation.eos_ids == (2,)  # of config.json
    file = tmp_path / "generation_config.json"
    file.write_text(
        json.dumps({"eos_token_id": [7, 2, 7], "bos_token_id": 1, "temperature": 0.6, "top_k": 20})
    )
    generation = open_checkpoint(tmp_path).generation
    assert generation.eos_ids == (7, 2)
    assert (generation.bos_id, generation.temperature, generation.top_k) == (1, 0.6, 20)
    assert generation.top_p is None
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    generation = open_checkpoint(tmp_path).generation
    assert (generation.temperature, generation.eos_ids) == (0.0, (2,))


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"packaged model \(abacus, .*folder.*gguf.*hub id"):
        open_checkpoint("no such thing")
    with pytest.raises(ValueError, match=r"gone\.gguf: there is no such file"):
        open_checkpoint(tmp_path / "gone.gguf")
    with pytest.raises(ValueError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ValueError, match=r"name .*m\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"m\.gguf: can't be mapped"):
        open_checkpoint(tmp_path / "m.gguf")
