"""Folders that `taut quantize` writes: read back bit for bit, whole or not there at all."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.build import load_model, load_tokenizer
from engine.config import ModelSpec
from engine.kernels.formats import Nvfp4Parts
from engine.kernels.nvfp4 import ScaleSearch
from engine.model import nvfp4_write
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.decoder import Decoder
from engine.model.nvfp4_write import FUSED, write_nvfp4
from engine.model.quantize import as_nvfp4
from engine.model.tensors import tensor_shapes
from tests.model.test_decoder import alone, random_ids
from tests.tiny import tiny_checkpoint, write_folder

TEXT = "The quick brown fox: 12 < 3?\n\n  <|im_start|>user 数🎈<|im_end|><think>"


def source_folder(path: Path, family: str = "qwen2", **options: object) -> Path:
    tiny = tiny_checkpoint(family, intermediate_size=144)
    return write_folder(path, tiny.config, tiny.tensors, **options)  # type: ignore[arg-type]


def written(source: Path, out: Path, search: ScaleSearch = "max") -> Checkpoint:
    write_nvfp4(open_checkpoint(source), str(source), out, search)
    checkpoint = open_checkpoint(out)
    checkpoint.check()
    return checkpoint


def dense(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    parts = checkpoint.packed(name, shape)
    return checkpoint.tensor(name, shape) if parts is None else parts.dense(torch.float32)


def assert_same_values(one: Checkpoint, source: Checkpoint) -> None:
    """Matrices are those of the format, alone or fused; all else is the source's."""
    shapes = tensor_shapes(source.config)
    assert one.config == source.config
    for layer in range(source.config.layers):
        for modules in FUSED:
            names = [f"model.layers.{layer}.{module}.weight" for module in modules]
            whole = torch.cat([source.tensor(name, shapes[name]) for name in names])
            parts = as_nvfp4(whole, None, torch.float32)
            ends = [*accumulate(shapes.pop(name)[0] for name in names)]
            rows = parts.dense(torch.float32).tensor_split(ends[:-1])
            for name, expected in zip(names, rows, strict=True):
                assert torch.equal(dense(one, name, tuple(expected.shape)), expected), name
    for name, shape in shapes.items():
        assert torch.equal(one.tensor(name, shape), source.tensor(name, shape)), name


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # biases and a tied head; norms, untied
def test_reading_back_gives_the_values_of_weights_nvfp4(family: str, tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source", family, dtype=torch.bfloat16)
    one = written(source, tmp_path / "out")
    assert_same_values(one, open_checkpoint(source))
    assert load_tokenizer(one).fingerprint == load_tokenizer(open_checkpoint(source)).fingerprint
    assert one.generation == open_checkpoint(source).generation

    def load(folder: Path, weights: str) -> Decoder:
        return load_model("main", ModelSpec(str(folder), weights=weights, device="cpu"), ()).decoder

    ids = random_ids(20)
    stored, rounded = load(tmp_path / "out", "nvfp4"), load(source, "nvfp4")
    assert torch.equal(alone(stored, ids), alone(rounded, ids))
    assert stored.nbytes == rounded.nbytes


def test_what_other_engines_read(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    written(source, tmp_path / "out", "mse")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    down = "model.layers.0.mlp.down_proj."
    found = {name: t for name, t in tensors.items() if name.startswith(down)}
    assert {name.removeprefix(down): (t.dtype, list(t.shape)) for name, t in found.items()} == {
        "weight_packed": (torch.uint8, [64, 72]),
        "weight_scale": (torch.float8_e4m3fn, [64, 9]),
        "weight_global_scale": (torch.float32, [1]),
    }
    q, k, gate, up = (
        tensors[f"model.layers.0.{module}.weight_global_scale"]
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj")
    )
    assert (q == k).all()
    assert (gate == up).all()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    quantization = config["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["format"] == "nvfp4-pack-quantized"
    assert quantization["ignore"] == ["lm_head"]
    weights = quantization["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["group_size"], weights["strategy"]) == (
        4,
        16,
        "tensor_group",
    )


def test_the_search_is_written_too(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 144)
    truth = open_checkpoint(source).tensor(name, shape)
    searches: tuple[ScaleSearch, ...] = ("max", "mse")
    errors = []
    for search in searches:
        parts = written(source, tmp_path / search, search).packed(name, shape)
        assert isinstance(parts, Nvfp4Parts)
        errors.append(float((parts.dense(torch.float32) - truth).square().sum()))
    assert errors[1] < 0.85 * errors[0]


def test_many_files_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfp4_write, "SHARD_BYTES", 40_000)
    source = source_folder(tmp_path / "source", shards=2)
    one = written(source, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert not list((tmp_path / "out").glob("part-*"))
    assert_same_values(one, open_checkpoint(source))


def write_gguf(file: Path) -> None:
    """A tiny Qwen2 with its tokenizer, named as its converter names things."""
    tiny = tiny_checkpoint("qwen2", intermediate_size=144)
    config = tiny.config
    folder = write_folder(file.parent / "hf", config, tiny.tensors)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"])
    added = {t["content"]: t for t in tokenizer["added_tokens"]}
    ids |= {content: t["id"] for content, t in added.items()}
    tokens = sorted(ids, key=lambda token: ids[token])
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.q_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens]
    )
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(ids["<|endoftext|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template("{{ messages[0].content }}")
    writer.add_string("general.license", "apache-2.0")
    from engine.model.gguf_file import _stored_name

    for name, tensor in tiny.tensors.items():
        writer.add_tensor(_stored_name(name), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_whole_folder(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    source, one = open_checkpoint(file), written(file, tmp_path / "out")
    assert_same_values(one, source)
    assert one.generation.eos_ids == source.generation.eos_ids
    ours, theirs = load_tokenizer(one), load_tokenizer(source)
    assert ours.fingerprint == theirs.fingerprint
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert (ours.bos_id, ours.eos_id, ours.add_bos) == (theirs.bos_id, theirs.eos_id, False)
    assert ours.chat_template == theirs.chat_template
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith('---\nbase_model: "tiny"\n')
    assert 'license: "apache-2.0"' in card
    assert "quantised already" in card
    assert str(tmp_path) not in card


def test_the_card_names_source_and_licence(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "some-model")
    written(source, tmp_path / "a")
    assert "doesn't name its licence" in (tmp_path / "a" / "README.md").read_text()
    (source / "README.md").write_text("---\nlicense: mit\n---\n# It\n")
    (source / "LICENSE").write_text("words")
    written(source, tmp_path / "b")
    card = (tmp_path / "b" / "README.md").read_text()
    assert "Licence of the source: mit." in card
    assert 'base_model: "some-model"' in card
    assert (tmp_path / "b" / "LICENSE").read_text() == "words"


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    source = source_folder(tmp_path / "source")
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        written(source, source)
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        written(source, source / "config.json")
    (tmp_path / "empty").mkdir()
    written(source, tmp_path / "empty")
    with pytest.raises(ValueError, match="is quantised to nvfp4 already"):
        written(tmp_path / "empty", tmp_path / "again")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    tiny = tiny_checkpoint("qwen2", intermediate_size=144)
    tensors = dict(tiny.tensors)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] = torch.nan
    source = write_folder(tmp_path / "source", tiny.config, tensors)
    with pytest.raises(ValueError, match=rf"{name}: the matrix holds values that aren't finite"):
        written(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
