"""GGUF files: the header, the number formats, the converter's permutation, and every refusal."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from engine.model.architecture import DecoderConfig
from engine.model.checkpoint import open_checkpoint
from engine.model.gguf_blocks import FLOATS, dequantise, supported
from engine.model.gguf_file import GGUFFile, _stored_name
from engine.model.gguf_header import read_header
from engine.model.tensors import tensor_shapes

Kind = GGMLQuantizationType
Change = Callable[[gguf.GGUFWriter], None]

HIDDEN, INNER, VOCAB, LAYERS, HEADS, KV_HEADS, WIDTH = 64, 96, 50, 2, 4, 2, 16
BLOCKS = [kind for kind in GGML_QUANT_SIZES if kind not in FLOATS and supported(kind)]
SIMPLE = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0)  # those that we unpack ourselves
QK = (("q_proj", HEADS), ("k_proj", KV_HEADS))


def names(flags: dict[str, bool]) -> dict[str, tuple[int, ...]]:
    config = DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        layers=LAYERS,
        q_heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=WIDTH,
        norm_eps=1e-5,
        max_positions=128,
    )
    return tensor_shapes(replace(config, **flags))  # type: ignore[arg-type]


def permuted(name: str, value: np.ndarray) -> np.ndarray:
    """What the converter does to q and k of Llama-type models."""
    for part, heads in QK:
        if f".{part}." in name:
            halves = value.reshape(heads, 2, WIDTH // 2, *value.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))
    return value


def write(
    file: Path,
    arch: str = "llama",
    kind: Kind = Kind.F32,
    change: Change | None = None,
    skip: str = "",
    flags: dict[str, bool] | None = None,
) -> dict[str, np.ndarray]:
    """A random model of a file; returns its weights by Hugging Face's names."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH)
    weights = {}
    for name, shape in names(flags or {}).items():
        value = rng.standard_normal(shape).astype(np.float32)
        weights[name] = value
        stored = permuted(name, value) if arch == "llama" else value
        if len(shape) == 2 and kind != Kind.F32:
            stored = quantize(stored, kind)
            writer.add_tensor(_stored_name(name), stored, raw_dtype=kind)
        elif _stored_name(name) != skip:
            writer.add_tensor(_stored_name(name), stored)
    if change:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_equal_the_gguf_package_bit_for_bit(kind: Kind) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 60, (5, 100 * size), np.uint8)  # halves below 60 * 257 are finite
    if kind in SIMPLE:
        raw = rng.integers(0, 256, (5, 100 * size), np.uint8)
        scales = rng.standard_normal((500, 2)).astype(np.float16).view(np.uint8)
        raw.reshape(500, size)[:, :4] = scales
    ours = dequantise(torch.from_numpy(raw), kind)
    np.testing.assert_array_equal(ours.numpy(), dequantize(raw, kind))
    assert ours.shape == (5, 100 * block)


@pytest.mark.parametrize("kind", [Kind.Q4_1, Kind.Q6_K], ids=lambda kind: kind.name)
def test_large_tensors_are_cut_and_joined(kind: Kind) -> None:
    size = GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(2).integers(0, 60, (7, 700 * size), np.uint8)
    raw = np.tile(raw, (1, 32 if size < 50 else 4))
    ours = dequantise(torch.from_numpy(raw), kind)
    np.testing.assert_array_equal(ours.numpy(), dequantize(raw, kind))


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("llama", {}),
        ("llama", {"qkv_bias": True, "out_bias": True, "tied_embeddings": True}),
        ("qwen2", {"qkv_bias": True}),
        ("qwen3", {"qk_norm": True, "tied_embeddings": True}),
    ],
)
def test_tensors_come_back_under_their_names(
    tmp_path: Path, arch: str, flags: dict[str, bool]
) -> None:
    weights = write(tmp_path / "m.gguf", arch, flags=flags)
    found = open_checkpoint(tmp_path / "m.gguf")
    found.check()
    assert found.config.head_dim == WIDTH
    assert found.config.family == arch
    assert {flag: getattr(found.config, flag) for flag in flags} == flags
    assert tensor_shapes(found.config).keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(found.tensor(name, value.shape).numpy(), value)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.BF16, Kind.F16])
def test_quantised_rows_and_tensors(tmp_path: Path, kind: Kind) -> None:
    weights = write(tmp_path / "m.gguf", kind=kind)
    found = open_checkpoint(tmp_path / "m.gguf")
    for name, value in weights.items():
        expected = value
        if value.ndim == 2:
            expected = dequantize(quantize(value, kind), kind)  # blocks lie within rows
        ours = found.tensor(name, value.shape)
        np.testing.assert_array_equal(ours.float().numpy(), expected)
    name = "model.embed_tokens.weight"
    ids = torch.tensor([3, 49, 3, 0])
    table = found.tensor(name, (VOCAB, HIDDEN))
    assert torch.equal(found.rows(name, (VOCAB, HIDDEN))(ids), table[ids])


def test_metadata_are_plain_values_that_the_gguf_package_reads_too(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_string("a.string", "naïve \U0001f600")
        writer.add_array("a.strings", ["", "x", "é" * 300])
        writer.add_array("a.floats", [0.5, -1.0])
        writer.add_bool("a.bool", True)
        writer.add_int64("a.int64", -5)
        writer.add_float64("a.float64", 0.1)
        writer.add_uint64("a.uint64", 1 << 40)

    write(tmp_path / "m.gguf", change=change)
    ours = read_header(tmp_path / "m.gguf").metadata
    theirs = gguf.GGUFReader(tmp_path / "m.gguf").fields
    assert ours["a.strings"] == ["", "x", "é" * 300]
    assert ours["a.bool"] is True
    assert ours == {k: f.contents() for k, f in theirs.items() if not k.startswith("GGUF.")}


def test_every_cut_of_a_file_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    info = read_header(tmp_path / "whole.gguf")
    last = max(t.start + t.nbytes for t in info.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 37), len(whole) // 2, last - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_header(cut)


def test_noise_in_the_header_never_raises_anything_else(tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    rng = np.random.default_rng(3)
    noisy = tmp_path / "noisy.gguf"
    messages = []
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, 2500, 4):
            data[at] = rng.integers(256)
        noisy.write_bytes(data)
        try:
            GGUFFile(noisy, "noisy").check()
        except ValueError as e:
            messages.append(str(e))
    assert len(messages) > 50
    assert all("noisy.gguf" in message for message in messages)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"GGML" + struct.pack("<I", 3), "is no GGUF file"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
    ],
)
def test_other_files_and_versions(tmp_path: Path, head: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(head + bytes(64))
    with pytest.raises(ValueError, match=words):
        open_checkpoint(tmp_path / "m.gguf")


REFUSED: list[tuple[str, Change, str]] = [
    ("llama", lambda w: w.add_sliding_window(64), "sliding-window"),
    ("llama", lambda w: w.add_expert_count(8), "mixture of experts"),
    ("llama", lambda w: w.add_key_length(32), "rope.dimension_count"),
    ("llama", lambda w: w.add_value_length(32), "values of another size"),
    ("llama", lambda w: w.add_uint16("split.count", 2), "merge"),
    ("llama", lambda w: w.add_attention_scale(0.5), "attention scale"),
    (
        "llama",
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "'longrope' is not supported",
    ),
    ("gemma", lambda w: None, "architecture 'gemma' is not supported"),
    (
        "llama",
        lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 3.0, np.float32)),
        "rope_freqs.weight",
    ),
]


@pytest.mark.parametrize(("arch", "change", "words"), REFUSED)
def test_refusals_name_the_file_and_the_reason(
    tmp_path: Path, arch: str, change: Change, words: str
) -> None:
    write(tmp_path / "m.gguf", arch, change=change)
    with pytest.raises(ValueError, match=words) as e:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf" in str(e.value)


def test_check_names_missing_surplus_and_misshapen_tensors(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write(file, skip="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        open_checkpoint(file).check()
    write(file, change=lambda w: w.add_tensor("blk.0.ffn_up.bias", np.zeros(INNER, np.float32)))
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.bias is not part of"):
        open_checkpoint(file).check()
    short = np.zeros((INNER, HIDDEN - 1), np.float32)
    write(
        file,
        skip="blk.1.ffn_up.weight",
        change=lambda w: w.add_tensor("blk.1.ffn_up.weight", short),
    )
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight has shape \[96, 63\].*\[96, 64"):
        open_checkpoint(file).check()


def test_a_type_that_cannot_be_dequantised_names_its_tensor(tmp_path: Path) -> None:
    write(
        tmp_path / "m.gguf",
        skip="output_norm.weight",
        change=lambda w: w.add_tensor("output_norm.weight", np.zeros(HIDDEN, np.int32)),
    )
    with pytest.raises(ValueError, match=r"output_norm\.weight .* type I32"):
        open_checkpoint(tmp_path / "m.gguf").check()


def test_llama3_scaling_is_known_from_its_divisors(tmp_path: Path) -> None:
    theta, factor, dims = 500_000.0, 32.0, np.arange(0, WIDTH, 2)
    waves = 2 * np.pi * theta ** (dims / WIDTH)
    blend = (8192 / waves - 1) / 3
    divisors = np.where(waves < 8192 / 4, 1, np.where(waves > 8192, factor, 0)).astype(np.float64)
    between = divisors == 0
    divisors[between] = 1 / ((1 - blend[between]) / factor + blend[between])
    assert between.any()

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(theta)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))

    write(tmp_path / "m.gguf", change=change)
    found = open_checkpoint(tmp_path / "m.gguf")
    found.check()
    rope = found.config.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("llama3", 32.0, 8192)
    assert (rope.theta, rope.low_freq_factor, rope.high_freq_factor) == (theta, 1.0, 4.0)


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    write(tmp_path / "m.gguf", change=yarn)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("yarn", 4.0, 10_000.0)
    assert config.max_positions == 256

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    write(tmp_path / "m.gguf", change=linear)
    config = open_checkpoint(tmp_path / "m.gguf").config
    assert (config.rope.kind, config.rope.factor, config.max_positions) == ("linear", 2.0, 128)


def test_ends_of_sequence_and_sampling_defaults(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(["a", "<|im_end|>", "</s>", "<|endoftext|>", "<|eot_id|>"])
        writer.add_token_types([1, 3, 3, 1, 3])  # <|endoftext|> is ordinary text here
        writer.add_eos_token_id(2)
        writer.add_bos_token_id(0)
        for key, value in {"temp": 0.6, "top_p": 0.95}.items():
            writer.add_float32(f"general.sampling.{key}", value)
        writer.add_int32("general.sampling.top_k", 20)

    write(tmp_path / "m.gguf", change=change)
    generation = open_checkpoint(tmp_path / "m.gguf").generation
    assert generation.eos_ids == (2, 1, 4)
    assert (generation.bos_id, generation.top_k, generation.min_p) == (0, 20, None)
    assert generation.temperature == pytest.approx(0.6)
    assert generation.top_p == pytest.approx(0.95)


@pytest.mark.packaged
def test_the_packaged_model_opens_whole() -> None:
    found = open_checkpoint("smollm2")
    found.check()
    config: Any = found.config
    assert (config.layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert config.tied_embeddings
    assert found.generation.eos_ids == (2, 0)
    assert found.metadata is not None
    assert len(found.metadata["tokenizer.ggml.tokens"]) == 49152
    name = "model.layers.29.mlp.down_proj.weight"
    weight = found.tensor(name, (576, 1536))
    assert weight.isfinite().all()
    assert 0.01 < weight.std() < 1.0
