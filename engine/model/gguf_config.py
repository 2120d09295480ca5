"""GGUF metadata as our own numbers; what isn't supported is refused in words.

Architecture "llama" covers Llama and Mistral. Its converter stores Llama 3's RoPE scaling as a
tensor of divisors of the frequencies (rope_freqs.weight); they are recognised when they are those
of that family's constants (original context 8192, low and high factors 1 and 4) with any factor,
and refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from engine.model.architecture import DecoderConfig, RopeConfig, reach, uneven_heads
from engine.model.generation import GenerationDefaults
from engine.model.gguf_header import Header
from engine.model.keys import Keys

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<end_of_turn>")
_CONTROL = 3  # token type


def read_config(header: Header, rope_divisors: Tensor | None) -> DecoderConfig:
    """The decoder that the metadata describe; `rope_divisors` is rope_freqs.weight, if any."""
    arch = header.metadata.get("general.architecture")
    keys = Keys(header.file, header.metadata, f"{arch}.")
    if arch not in ARCHITECTURES:
        raise keys.error(
            f"architecture {arch!r} is not supported yet; supported: {', '.join(ARCHITECTURES)}"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise keys.error("tensor token_embd.weight is missing")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    max_positions = keys.integer("context_length")
    _refuse(keys, head_dim)
    rope = _rope(keys, head_dim, max_positions, rope_divisors)
    config = DecoderConfig(
        family=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        layers=keys.integer("block_count"),
        q_heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=keys.positive("attention.layer_norm_rms_epsilon"),
        max_positions=reach(rope, max_positions),
        rope=rope,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        out_bias="blk.0.attn_output.bias" in header.tensors,
        qk_norm=arch == "qwen3",
        tied_embeddings="output.weight" not in header.tensors,
    )
    if fault := uneven_heads(config):
        raise keys.error(fault)
    return config


def _refuse(keys: Keys, head_dim: int) -> None:
    rotated = keys.integer("rope.dimension_count", head_dim)
    value_length = keys.integer("attention.value_length", head_dim)
    scale = keys.number("attention.scale", head_dim**-0.5)
    reasons = {
        "its weights split over several files (merge them with llama-gguf-split --merge)": (
            keys.values.get("split.count", 1) > 1
        ),
        "sliding-window attention (attention.sliding_window)": keys.get("attention.sliding_window"),
        "a mixture of experts (expert_count)": keys.get("expert_count"),
        f"rotation of {rotated} of {head_dim} numbers of a head (rope.dimension_count)": (
            rotated != head_dim
        ),
        f"values of another size ({value_length}) than keys ({head_dim})": (
            value_length != head_dim
        ),
        "clamped queries, keys and values (attention.clamp_kqv)": keys.get("attention.clamp_kqv"),
        f"an attention scale of its own ({scale})": not math.isclose(
            scale, head_dim**-0.5, rel_tol=1e-5
        ),
    }
    for what, present in reasons.items():
        if present:
            raise keys.error(f"the model has {what}, which is not supported yet")


def _rope(keys: Keys, head_dim: int, max_positions: int, divisors: Tensor | None) -> RopeConfig:
    theta = keys.positive("rope.freq_base", 10_000.0)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0)) or 1.0
    kind = keys.get("rope.scaling.type") or ("linear" if factor != 1.0 else "none")
    if divisors is not None:
        if kind != "none":
            raise keys.error(f"rope_freqs.weight beside RoPE scaling {kind!r} is not supported")
        return _llama3(keys, theta, head_dim, divisors)
    match kind:
        case "none":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=factor)
        case "yarn":
            return _yarn(keys, theta, factor, max_positions)
    raise keys.error(f"RoPE scaling {kind!r} is not supported yet")


def _yarn(keys: Keys, theta: float, factor: float, max_positions: int) -> RopeConfig:
    for key, usual in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if (value := keys.number(f"rope.scaling.{key}", usual)) != usual:
            raise keys.error(f"YaRN with {key} {value} is not supported yet, only {usual}")
    # the file's attention factor multiplies YaRN's own, 0.1 ln(factor) + 1
    extra = keys.number("rope.scaling.yarn_attn_factor", keys.number("rope.scaling.attn_factor", 1))
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=keys.integer("rope.scaling.original_context_length", max_positions),
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if extra == 1.0 else extra * (0.1 * math.log(factor) + 1.0),
    )


def _llama3(keys: Keys, theta: float, head_dim: int, divisors: Tensor) -> RopeConfig:
    if divisors.shape != (head_dim // 2,):
        raise keys.error(f"rope_freqs.weight has shape {list(divisors.shape)}")
    factor = float(divisors[-1])  # the longest wave is stretched by the whole factor
    if factor == 1.0 and bool((divisors == 1.0).all()):
        return RopeConfig(theta=theta)
    original, low, high = 8192, 1.0, 4.0
    waves = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / waves - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not torch.allclose(divisors.double(), expected, rtol=1e-3):
        raise keys.error(
            "rope_freqs.weight holds a RoPE scaling other than that of Llama 3 (original context "
            "8192, factors 1 and 4), which is not supported yet"
        )
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def read_generation(metadata: Mapping[str, Any]) -> GenerationDefaults:
    """Ends of sequence and sampling defaults.

    Files often name one end only, though a chat turn and a document end by different tokens. So
    control tokens with the well-known names of ends count as well, as llama.cpp has it. That is
    right for plain continuation too: a model emits such a token only where its text ends, and none
    of them can come from ordinary text, since only tokens of type control are taken.
    """
    get = metadata.get
    ends = [get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    tokens, types = get("tokenizer.ggml.tokens") or [], get("tokenizer.ggml.token_type") or []
    for name in _ENDS:
        if name in tokens and types[(at := tokens.index(name)) : at + 1] == [_CONTROL]:
            ends.append(at)
    return GenerationDefaults(
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_id=get("tokenizer.ggml.bos_token_id"),
        temperature=get("general.sampling.temp"),
        top_p=get("general.sampling.top_p"),
        min_p=get("general.sampling.min_p"),
        repetition_penalty=get("general.sampling.penalty_repeat"),
        top_k=get("general.sampling.top_k"),
    )
