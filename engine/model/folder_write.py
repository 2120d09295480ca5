"""What stands around the weights in a Hugging Face folder that is written: config and tokenizer.

A folder's own files are copied. For a GGUF file they are written from its metadata, so that other
engines read the same model and the same text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tokenizers import decoders
from tokenizers.processors import TemplateProcessing

from engine.model.architecture import DecoderConfig, RopeConfig
from engine.model.checkpoint import Checkpoint
from engine.model.generation import GenerationDefaults
from engine.model.vocab_folder import read_json
from engine.model.vocab_gguf import read_gguf
from engine.model.vocabulary import SPACE_MARK, SpacePieces

_COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE*",
    "NOTICE*",
)


def write_around(checkpoint: Checkpoint, folder: Path, quantization: Mapping[str, Any]) -> None:
    """All files but the weights; `quantization` is what config.json says of those."""
    if checkpoint.folder is not None:
        config = read_json(checkpoint.folder / "config.json")
        for pattern in _COPIED:
            for file in filter(Path.is_file, checkpoint.folder.glob(pattern)):
                shutil.copyfile(file, folder / file.name)
    else:
        assert checkpoint.metadata is not None
        config = _config(checkpoint.config) | _ids(checkpoint.generation)
        write_json(folder / "generation_config.json", _generation(checkpoint.generation))
        _write_tokenizer(checkpoint.metadata, folder, checkpoint.config.max_positions)
    write_json(folder / "config.json", config | {"quantization_config": quantization})


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(config: DecoderConfig) -> dict[str, Any]:
    """config.json of a model whose file has none; `read_config` makes the same of it again."""
    if config.out_bias != (config.qkv_bias and config.family != "qwen2"):
        raise ValueError(
            f"a {config.family} model with biases in only some of its projections can't be written "
            "as a folder: config.json has no words for it"
        )
    values = {
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
        "attention_bias": config.qkv_bias,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
    }
    return {key: value for key, value in values.items() if value is not None}


def _rope(rope: RopeConfig) -> dict[str, Any] | None:
    names = {"original_max_positions": "original_max_position_embeddings", "kind": "rope_type"}
    used = {
        "linear": ("factor",),
        "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "attention_factor"),
    }.get(rope.kind)
    if used is None:
        return None
    values = {
        names.get(field.name, field.name): getattr(rope, field.name)
        for field in fields(rope)
        if field.name == "kind" or field.name in used
    }
    return {key: value for key, value in values.items() if value is not None}


def _ids(generation: GenerationDefaults) -> dict[str, Any]:
    values = {"bos_token_id": generation.bos_id, "eos_token_id": list(generation.eos_ids) or None}
    return {key: value for key, value in values.items() if value is not None}


def _generation(generation: GenerationDefaults) -> dict[str, Any]:
    names = ("temperature", "top_p", "min_p", "repetition_penalty", "top_k")
    given = {name: getattr(generation, name) for name in names}
    if given["temperature"] == 0:  # how a Hugging Face file says it
        given |= {"do_sample": False, "temperature": None}
    elif any(value is not None for value in given.values()):
        given["do_sample"] = True
    return _ids(generation) | {key: value for key, value in given.items() if value is not None}


def _write_tokenizer(metadata: Mapping[str, Any], folder: Path, max_positions: int) -> None:
    backend, vocabulary = read_gguf(metadata)
    pieces = vocabulary.pieces
    if isinstance(pieces, SpacePieces):
        steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " ")]
        steps += [decoders.ByteFallback()] if pieces.byte_fallback else []
        steps += [decoders.Fuse()]
        steps += [decoders.Strip(" ", 1, 0)] if pieces.strips_space else []
        backend.decoder = decoders.Sequence(steps)
    else:
        backend.decoder = decoders.ByteLevel()

    def content(token_id: int | None) -> str | None:
        return None if token_id is None else vocabulary.piece(token_id)

    bos, eos = content(vocabulary.bos_id), content(vocabulary.eos_id)
    if vocabulary.add_bos and bos is not None:
        backend.post_processor = TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, vocabulary.bos_id)]
        )
    backend.save(str(folder / "tokenizer.json"))
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "add_bos_token": vocabulary.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": vocabulary.chat_template,
    }
    write_json(folder / "tokenizer_config.json", {k: v for k, v in values.items() if v is not None})
