"""One model in both kinds of files: a GGUF file gives what the Hugging Face folder gives.

Families and RoPE scalings that a GGUF file can spell (it has none for `dynamic`).
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine import Output
from engine.model.architecture import DecoderConfig, RopeConfig
from engine.model.checkpoint import open_checkpoint
from engine.model.gguf_file import _stored_name
from engine.prompt import Prompt
from tests.conftest import MakeEngine
from tests.engines import Model, Tape, greedy, write_model
from tests.tiny import FAMILIES, TEMPLATE, tiny_tokenizer

# what llama.cpp's converter knows of Llama 3's scaling is one file of divisors: see _llama3
LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_positions=8192)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "untied-biased": ("llama", {"tied_embeddings": False, "qkv_bias": True, "out_bias": True}),
    "linear": ("mistral", {"rope": RopeConfig(kind="linear", factor=4.0)}),
    "llama3": ("llama", {"rope": replace(LLAMA3, theta=50_000.0)}),
    "yarn": ("qwen2", {"rope": RopeConfig(kind="yarn", factor=4.0, original_max_positions=128)}),
}


def write_gguf(file: Path, config: DecoderConfig, tensors: dict[str, Tensor]) -> None:
    """As llama.cpp's converter would: Mistral is a llama, whose q and k it permutes."""
    arch = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.q_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    _add_rope(writer, config)
    _add_tokenizer(writer)
    for name, tensor in tensors.items():
        value = tensor.numpy()
        heads = {"q_proj": config.q_heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
        if arch == "llama" and heads is not None:
            halves = value.reshape(heads, 2, config.head_dim // 2, -1)
            value = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        writer.add_tensor(_stored_name(name), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_rope(writer: gguf.GGUFWriter, config: DecoderConfig) -> None:
    rope, dims = config.rope, np.arange(0, config.head_dim, 2) / config.head_dim
    if rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope.factor)
    elif rope.kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope.factor)
        writer.add_rope_scaling_orig_ctx_len(rope.original_max_positions or 0)
    elif rope.kind == "llama3":
        waves = 2 * np.pi * rope.theta**dims
        smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
        divisors = 1 / ((1 - smooth) / rope.factor + smooth)
        assert divisors.min() == 1
        assert divisors.max() == rope.factor
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokenizer = tiny_tokenizer()
    spec = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    added = {token["id"]: 3 if token["special"] else 4 for token in spec["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokenizer.id_to_token(i) or "" for i in range(size)])
    writer.add_token_types([added.get(i, 1) for i in range(size)])
    writer.add_token_merges([" ".join(merge) for merge in spec["model"]["merges"]])
    ids = tokenizer.get_vocab()
    writer.add_bos_token_id(ids["<|endoftext|>"])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_chat_template(TEMPLATE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_file_answers_as_the_folder(
    variant: str, tmp_path: Path, make_engine: MakeEngine
) -> None:
    """The same numbers and tokens, from text and from chat messages."""
    family, flags = VARIANTS[variant]
    folder = write_model(tmp_path / "folder", family, **flags)
    file = tmp_path / "model.gguf"
    write_gguf(file, folder.config, folder.tensors)
    config = open_checkpoint(file).config
    assert config.rope.kind == folder.config.rope.kind
    assert config.norm_eps == pytest.approx(folder.config.norm_eps)  # a float32 there
    same = replace(config, family=family, rope=folder.config.rope, norm_eps=folder.config.norm_eps)
    assert same == folder.config
    asked: list[Prompt] = [
        "The answer is 42, caf\u00e9 \U0001f600 <think>",
        [{"role": "user", "content": "one and one"}],
        list(range(3, 260)),  # far enough for a stretched rotation to show
    ]
    said: list[list[Output]] = []
    logits: list[Tensor] = []
    for model in (folder, Model(file, config, folder.tensors)):
        engine = make_engine(model)
        assert engine.models["main"].checkpoint.generation.eos_ids
        tape = Tape(engine)
        said.append(engine.generate(asked, greedy(24)))
        logits.append(torch.cat([tape.stacked(output.id) for output in said[-1]]))
    for ours, theirs in zip(*said, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
