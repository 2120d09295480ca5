"""Tiny random models of every family: in memory, and as a Hugging Face folder on disk."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from engine.model.architecture import DecoderConfig, RopeConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")

ROPES = {
    "default": RopeConfig(theta=500_000.0),
    "linear": RopeConfig(kind="linear", factor=4.0),
    "dynamic": RopeConfig(kind="dynamic", factor=2.0, original_max_positions=256),
    "llama3": RopeConfig(kind="llama3", factor=8.0, original_max_positions=64),
    "yarn": RopeConfig(kind="yarn", factor=4.0, original_max_positions=128),
}

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_THINKING = ("<think>", "</think>")

_TEXT = (
    "The quick brown fox thinks that one and one make two. So the answer is in the box.\n\n"
    "Wait, let me think again: if the number of the words is even, then the sum is even too.\n\n"
)

_FLAGS: dict[str, dict[str, Any]] = {
    "llama": {"tied_embeddings": True},
    "qwen2": {"qkv_bias": True, "tied_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "mistral": {},
}


def tiny_config(family: str = "llama", **flags: Any) -> DecoderConfig:
    """2 layers, hidden 64, 4 query and 2 kv heads of 16 (qwen3: 32); flags replace any field."""
    config = DecoderConfig(
        family=family,
        vocab_size=304,  # past the tokenizer's last id, as padded vocabularies are
        hidden_size=64,
        intermediate_size=136,
        layers=2,
        q_heads=4,
        kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_positions=512,
    )
    return replace(config, **{**_FLAGS[family], **flags})


def tiny_tensors(config: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights by Hugging Face names, of a size that keeps activations near 1."""
    rng = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    tensors: dict[str, Tensor] = {}

    def add(name: str, *shape: int, around: float = 0.0, spread: float = 1.0) -> None:
        tensors[name] = around + spread * torch.randn(shape, generator=rng)

    def linear(name: str, out: int, ins: int, *, bias: bool = False) -> None:
        add(name + ".weight", out, ins, spread=ins**-0.5)
        if bias:
            add(name + ".bias", out, spread=0.5)

    add("model.embed_tokens.weight", config.vocab_size, hidden, spread=0.5)
    for layer in range(config.layers):
        attn, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for name, out in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            linear(attn + name, out, hidden, bias=config.qkv_bias)
        linear(attn + "o_proj", hidden, q, bias=config.out_bias)
        linear(mlp + "gate_proj", inner, hidden)
        linear(mlp + "up_proj", inner, hidden)
        linear(mlp + "down_proj", hidden, inner)
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            add(f"{attn}{name}.weight", config.head_dim, around=1.0, spread=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{name}.weight", hidden, around=1.0, spread=0.2)
    add("model.norm.weight", hidden, around=1.0, spread=0.2)
    if not config.tied_embeddings:
        linear("lm_head", config.vocab_size, hidden)
    return tensors


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint in memory."""

    config: DecoderConfig
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        assert self.tensors[name].shape == shape, name
        return self.tensors[name]

    def packed(self, name: str, shape: tuple[int, ...]) -> None:
        """All is floats."""

    def rows(self, name: str, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        table = self.tensor(name, shape)
        return lambda ids: F.embedding(ids, table)


def tiny_checkpoint(family: str = "llama", seed: int = 0, **flags: Any) -> TinyCheckpoint:
    config = tiny_config(family, **flags)
    return TinyCheckpoint(config, tiny_tensors(config, seed))


def hf_config(config: DecoderConfig) -> dict[str, Any]:
    """What config.json says of it."""
    data: dict[str, Any] = {
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.q_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
    }
    if config.family == "llama":
        data["attention_bias"] = config.qkv_bias and config.out_bias
    if config.family == "mistral":
        data["sliding_window"] = None
    if config.rope.kind == "dynamic":  # the file counts positions before stretching
        data["max_position_embeddings"] = config.rope.original_max_positions
    if config.rope.kind != "default":
        data["rope_scaling"] = _hf_rope(config.rope)
    return data


def _hf_rope(rope: RopeConfig) -> dict[str, Any]:
    fields: dict[str, tuple[str, ...]] = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": (
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }
    data: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.original_max_positions is not None and rope.kind != "dynamic":
        data["original_max_position_embeddings"] = rope.original_max_positions
    values = {name: getattr(rope, name) for name in fields.get(rope.kind, ())}
    return data | {name: value for name, value in values.items() if value is not None}


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges; ChatML and thinking markers at the end of the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=295,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in _MARKERS])
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in _THINKING])
    return tokenizer


def write_folder(
    path: Path,
    config: DecoderConfig,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
) -> Path:
    """A Hugging Face model folder: config, weights, generation defaults, tokenizer, template."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors(config) if tensors is None else tensors
    tokenizer = tiny_tokenizer()
    end, stop = (tokenizer.token_to_id(m) for m in ("<|endoftext|>", "<|im_end|>"))
    data = hf_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(path / "config.json", data | {"eos_token_id": stop, "bos_token_id": end})
    _write_json(
        path / "generation_config.json",
        {
            "bos_token_id": end,
            "eos_token_id": [stop, end],
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
    )
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_positions,
            "chat_template": TEMPLATE,
        },
    )
    _write_weights(path, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards)
    return path


def _write_weights(path: Path, tensors: dict[str, Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    files: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index_data = {"metadata": {"total_size": size}, "weight_map": files}
    _write_json(path / "model.safetensors.index.json", index_data)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
