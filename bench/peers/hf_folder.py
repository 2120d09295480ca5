"""A Hugging Face folder written from any checkpoint that Taut opens: bfloat16, the same values.

What Transformers, vLLM and OpenVINO's exporter read: everyone starts from one set of weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from engine.model.architecture import DecoderConfig
from engine.model.checkpoint import Checkpoint
from engine.model.pretokenizers import KINDS
from engine.model.tensors import tensor_shapes
from engine.model.tokenizer import tokenizer_from_gguf

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types
_PROBE = "Three 3.14 cats' naïve cafés — don't they? \n\n  Ünïcode 你好 🙂 12345\t<|im_start|>x"


def write(checkpoint: Checkpoint, folder: Path) -> None:
    """ValueError: a model that such a folder, or this writer, can't describe."""
    metadata = checkpoint.metadata
    if metadata is None:
        raise ValueError(f"{checkpoint.source} is no GGUF file")
    config = config_json(checkpoint.config, _ids(checkpoint, metadata))
    tokenizer = _tokenizer(metadata)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: checkpoint.tensor(name, shape).to(torch.bfloat16).contiguous()
        for name, shape in tensor_shapes(checkpoint.config).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", config)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(metadata, ids))


def config_json(config: DecoderConfig, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Plain decoders only: no RoPE scaling, since none of the race's models has one."""
    if config.family not in _CLASSES or config.rope.kind != "default":
        raise ValueError(
            f"a folder of a {config.family!r} model with RoPE {config.rope.kind!r} can't be "
            f"written; {', '.join(_CLASSES)} with plain RoPE can"
        )
    written: dict[str, Any] = {
        "architectures": [_CLASSES[config.family]],
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
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **ids,
    }
    if config.family == "llama":
        if config.qkv_bias != config.out_bias:
            raise ValueError("a llama with a bias on some of its attention only can't be written")
        written |= {"attention_bias": config.qkv_bias, "mlp_bias": False}
    if config.family == "qwen2":
        written["use_sliding_window"] = False
    return written


def _ids(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> dict[str, int | None]:
    ends = checkpoint.generation.eos_ids
    padding = metadata.get("tokenizer.ggml.padding_token_id")
    return {
        "bos_token_id": checkpoint.generation.bos_id,
        "eos_token_id": ends[0] if ends else None,
        "pad_token_id": ends[0] if padding is None and ends else padding,
    }


def _tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Of a byte-level vocabulary; checked against Taut's own on a text with all that is hard."""
    kind = KINDS.get(metadata.get("tokenizer.ggml.pre", "default"))
    if metadata.get("tokenizer.ggml.model") != "gpt2" or kind is None:
        raise ValueError("only a byte-level vocabulary of a known kind can be written")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(BPE(vocab, merges, ignore_merges=kind.ignore_merges))
    if (normalizer := kind.normalizer()) is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = kind.pre_tokenizer()
    made.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=types[i] == _CONTROL, normalized=False)
        for i, token in enumerate(tokens)
        if types[i] in (_CONTROL, _USER_DEFINED)
    ]
    made.add_tokens(added)
    ours = tokenizer_from_gguf(metadata).encode(_PROBE, add_special=False)
    theirs = made.encode(_PROBE, add_special_tokens=False).ids
    if ours != theirs:
        raise ValueError(f"the written tokenizer reads {_PROBE!r} otherwise: {theirs}, not {ours}")
    return made


def _tokenizer_config(metadata: Mapping[str, Any], ids: Mapping[str, int | None]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {
        name.removesuffix("_id"): tokens[token] for name, token in ids.items() if token is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **named,
        **(
            {"chat_template": metadata["tokenizer.chat_template"]}
            if "tokenizer.chat_template" in metadata
            else {}
        ),
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
