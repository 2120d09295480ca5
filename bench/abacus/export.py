"""A training checkpoint as a Hugging Face folder in bfloat16: what the engine and others load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.abacus.network import Network, Shape
from bench.abacus.vocabulary import END, TEMPLATE, build

MAX_POSITIONS = 2048


class Trained(NamedTuple):
    """What a checkpoint of `bench.abacus.train` holds, less the optimisers."""

    recipe: dict[str, Any]
    shape: Shape
    weights: dict[str, Tensor]  # by the network's own names, float32
    pools: int
    tokens: int
    seconds: float


def read_checkpoint(path: Path) -> Trained:
    """ValueError where there is none."""
    if not path.is_file():
        raise ValueError(f"there is no checkpoint {path}: python -m bench.abacus.train makes it")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    shape = Shape(**state["recipe"]["shape"])
    return Trained(state["recipe"], shape, state["network"], *state["progress"])


def write_folder(folder: Path, network: Network) -> None:
    """config.json, model.safetensors, generation_config.json and the tokenizer's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build()
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id("<|endoftext|>")
    _write(folder / "config.json", _config(network.shape) | {"eos_token_id": end})
    _write(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": end, "pad_token_id": pad},
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
            "chat_template": TEMPLATE,
        },
    )
    weights = {f"model.{name}": t.bfloat16() for name, t in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
