"""Weights of each format: rounded ones against the definition group by group, and what of a model
every format touches."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.build import load_model
from engine.config import ModelSpec
from engine.kernels import int8, nvfp4
from engine.model.decoder import Decoder
from engine.model.quantize import round_to_nearest
from tests import oracle
from tests.model.test_decoder import alone, random_ids
from tests.tiny import tiny_checkpoint, write_folder


def matrix(out: int, ins: int, around: float = 0.0) -> Tensor:
    return around + torch.randn(out, ins, generator=torch.Generator().manual_seed(out + ins))


def grid_of(values: list[float], bits: int) -> tuple[float, int]:
    """Step and zero point."""
    low, high = min(*values, 0.0), max(*values, 0.0)
    step = (high - low) / (2**bits - 1) or 1.0
    return step, round(-low / step)


def by_definition(weight: Tensor, bits: int, group: int) -> Tensor:
    rows = []
    for row in weight.tolist():
        rounded = []
        for start in range(0, len(row), group):
            step, zero = grid_of(row[start : start + group], bits)
            for value in row[start : start + group]:
                point = min(max(round(value / step) + zero, 0), 2**bits - 1)
                rounded.append((point - zero) * step)
        rows.append(rounded)
    return torch.tensor(rows)


@pytest.mark.parametrize("around", [0.0, 5.0, -5.0])
@pytest.mark.parametrize(("ins", "group"), [(64, 32), (70, 32), (20, 32), (9, 4)])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_is_the_definition(bits: int, ins: int, group: int, around: float) -> None:
    weight = matrix(5, ins, around)
    rounded = round_to_nearest(weight, bits, group)
    torch.testing.assert_close(rounded, by_definition(weight, bits, group), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_group_has_few_values_and_half_a_step_of_error(bits: int) -> None:
    weight = matrix(40, 32)
    for before, after in zip(weight, round_to_nearest(weight, bits), strict=True):
        step, _ = grid_of(before.tolist(), bits)
        assert after.unique().numel() <= 2**bits
        assert (before - after).abs().max() <= step / 2 * 1.0001
    assert (weight - round_to_nearest(weight, bits)).abs().max() > 1e-4, "it rounds"


def test_groups_are_neighbouring_columns_of_one_row() -> None:
    weight = matrix(3, 70)
    changed = weight.clone()
    changed[1, 40] = 100.0
    differs = round_to_nearest(changed, 3) != round_to_nearest(weight, 3)
    assert differs[1, 32:64].any()
    differs[1, 32:64] = False
    assert not differs.any()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rounding_again_changes_nothing(bits: int) -> None:
    once = round_to_nearest(matrix(20, 70), bits)
    torch.testing.assert_close(round_to_nearest(once, bits), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_and_groups_of_one_value_keep_it(dtype: torch.dtype) -> None:
    weight = torch.tensor([0.0, 0.3, -1.7, 1e-30, 3e4], dtype=dtype)[:, None].repeat(1, 40)
    rounded = round_to_nearest(weight, 3)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, weight, rtol=1e-6, atol=0.0)
    mixed = matrix(20, 32, around=2.0)
    mixed[:, ::3] = 0.0
    assert (round_to_nearest(mixed, 2)[:, ::3] == 0).all()


def test_the_given_tensor_is_left_alone() -> None:
    weight = matrix(4, 64)
    before = weight.clone()
    round_to_nearest(weight, 2)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("weight", "bits", "group", "words"),
    [
        (torch.ones(2, 2), 1, 32, "bits must be from 2 to 8, not 1"),
        (torch.ones(2, 2), 9, 32, "bits must be from 2 to 8, not 9"),
        (torch.ones(2, 2), 4, 0, "group must be at least 1, not 0"),
        (torch.ones(2), 4, 32, "weight must be a float matrix"),
        (torch.ones(2, 2, dtype=torch.int8), 4, 32, "weight must be a float matrix"),
    ],
)
def test_refused_in_words(weight: Tensor, bits: int, group: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        round_to_nearest(weight, bits, group)


def load(folder: Path, weights: str, activations: str = "float") -> Decoder:
    spec = ModelSpec(str(folder), device="cpu", weights=weights, activations=activations)
    return load_model("main", spec, ()).decoder


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])  # biases; norms; an untied head
def test_only_the_layers_matrices_are_rounded(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family)
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    tensors = {
        name: by_definition(tensor, 2, 32) if name.endswith("_proj.weight") else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    ids = random_ids(30)
    truth = oracle.logits(checkpoint.config, tensors, ids)
    plain = oracle.logits(checkpoint.config, checkpoint.tensors, ids)
    assert (truth - plain).abs().max() > 0.1
    torch.testing.assert_close(alone(load(folder, "rtn2"), ids), truth, rtol=1e-4, atol=1e-4)


def test_float_is_bit_for_bit_what_it_was(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen2")
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    ids = random_ids(30)
    before = Decoder.load(checkpoint, dtype=torch.float32, device="cpu")
    assert torch.equal(alone(load(folder, "float"), ids), alone(before, ids))


def test_more_bits_are_nearer(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    ids = random_ids(30)
    names = ["float", *(f"rtn{bits}" for bits in range(8, 1, -1))]
    logits = {name: alone(load(folder, name), ids) for name in names}
    errors = [(logits[name] - logits["float"]).std().item() for name in logits]
    assert errors == sorted(errors)
    assert 0 < errors[1] < 0.03 * logits["float"].std()


def in_nvfp4(*matrices: Tensor) -> list[Tensor]:
    """Matrices that run as one share a tensor scale."""
    q = nvfp4.quantise(torch.cat(matrices))
    whole = nvfp4.dequantise(q.codes, q.blocks, torch.full((len(q.codes),), q.scale))
    return list(whole.tensor_split([*accumulate(len(m) for m in matrices)][:-1]))


def in_int8(*matrices: Tensor) -> list[Tensor]:
    return [int8.dequantise(*int8.quantise(m)) for m in matrices]


def in_bf16(*matrices: Tensor) -> list[Tensor]:
    return [m.bfloat16().float() for m in matrices]


FUSED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])  # biases and a tied head; an untied one
@pytest.mark.parametrize("name", ["nvfp4", "int8", "bf16"])
def test_a_format_holds_matrices_and_head_and_keeps_the_rest(
    name: str, family: str, tmp_path: Path
) -> None:
    layers = {"nvfp4": in_nvfp4, "int8": in_int8, "bf16": in_bf16}[name]
    head = in_bf16 if name == "bf16" else in_int8
    checkpoint = tiny_checkpoint(family, intermediate_size=144, tied_embeddings=False)
    tensors = dict(checkpoint.tensors)
    if family == "qwen2":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    config = replace(checkpoint.config, tied_embeddings=family == "qwen2")
    folder = write_folder(
        tmp_path / "model",
        config,
        {n: t for n, t in tensors.items() if n != "lm_head.weight" or not config.tied_embeddings},
    )
    for index in range(config.layers):
        for group in FUSED:
            names = [f"model.layers.{index}.{module}.weight" for module in group]
            tensors |= dict(zip(names, layers(*(tensors[n] for n in names)), strict=True))
    [tensors["lm_head.weight"]] = head(tensors["lm_head.weight"])
    ids = random_ids(20)
    truth = oracle.logits(checkpoint.config, tensors, ids)
    decoder = load(folder, name)
    torch.testing.assert_close(alone(decoder, ids), truth, rtol=1e-4, atol=1e-4)
    assert (truth - alone(load(folder, "float"), ids)).abs().max() > 1e-3
    assert decoder.nbytes < load(folder, "float").nbytes * {"nvfp4": 0.3, "int8": 0.4}.get(
        name, 0.6
    )


def test_a_width_that_nvfp4_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")  # its MLP is 136 wide
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    with pytest.raises(ValueError, match=r"mlp.down_proj.weight: NVFP4 takes 16 .* has 136 inputs"):
        load(folder, "nvfp4")


@pytest.mark.parametrize("weights", ["int8", "nvfp4"])
def test_more_bits_of_activations_are_nearer(weights: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen2", intermediate_size=144)
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    ids = random_ids(30)
    exact = alone(load(folder, weights), ids)
    errors = [(alone(load(folder, weights, name), ids) - exact).std() for name in ("int16", "int8")]
    assert 0 < 20 * errors[0] < errors[1] < 0.1 * exact.std()


def test_rounded_activations_want_integer_weights(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    folder = write_folder(tmp_path / "model", checkpoint.config, checkpoint.tensors)
    with pytest.raises(ValueError, match="activations='int8' needs weights int8 or nvfp4, not 'bf"):
        load(folder, "bf16", "int8")
