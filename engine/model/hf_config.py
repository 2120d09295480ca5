"""config.json and generation_config.json of a Hugging Face folder, as our own numbers.

What would change the model's answers and isn't supported is refused here in words, so that nothing
is ever computed wrongly in silence.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.model.architecture import DecoderConfig, RopeConfig, reach, uneven_heads
from engine.model.generation import GenerationDefaults
from engine.model.keys import Keys

# The defaults that transformers gives a key which config.json leaves out, where families differ.
_MAX_POSITIONS = {"llama": 2048, "qwen2": 32768, "qwen3": 32768, "mistral": 131072}
_KV_HEADS = {"qwen2": 32, "qwen3": 32, "mistral": 8}
_HEAD_DIM = {"qwen3": 128}


def _read(file: Path) -> Keys:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: can't be read as JSON: {e}") from e
    if not isinstance(values, dict):
        raise ValueError(f"{file}: must hold a JSON object, not {type(values).__name__}")
    return Keys(file, values)


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that config.json describes."""
    keys = _read(folder / "config.json")
    family = keys.get("model_type")
    if family not in _MAX_POSITIONS:
        raise keys.error(
            f"model_type {family!r} is not supported yet; supported: {', '.join(_MAX_POSITIONS)}"
        )
    max_positions = keys.integer("max_position_embeddings", _MAX_POSITIONS[family])
    _refuse(keys, family, max_positions)
    rope = _rope(keys, max_positions)
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    biased = bool(keys.get("attention_bias")) and family in ("llama", "qwen3")
    config = DecoderConfig(
        family=family,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size"),
        layers=keys.integer("num_hidden_layers"),
        q_heads=heads,
        kv_heads=keys.integer("num_key_value_heads", _KV_HEADS.get(family, heads)),
        head_dim=keys.integer("head_dim", _HEAD_DIM.get(family, hidden // heads)),
        norm_eps=keys.positive("rms_norm_eps", 1e-6),
        max_positions=reach(rope, max_positions),
        rope=rope,
        qkv_bias=biased or family == "qwen2",
        out_bias=biased,
        qk_norm=family == "qwen3",
        tied_embeddings=bool(keys.get("tie_word_embeddings", False)),
    )
    if fault := uneven_heads(config):
        raise keys.error(fault)
    return config


def _refuse(keys: Keys, family: str, max_positions: int) -> None:
    get = keys.get
    # null means none here; left out, transformers takes 4096
    window = keys.values.get("sliding_window", 4096) if family == "mistral" else None
    reasons = {
        "a bias in the MLP (mlp_bias)": bool(get("mlp_bias")),
        f"the activation hidden_act={get('hidden_act')!r} (only silu)": get("hidden_act", "silu")
        not in ("silu", "swish"),
        "sliding-window attention (use_sliding_window)": family in ("qwen2", "qwen3")
        and bool(get("use_sliding_window")),
        f"sliding-window attention (sliding_window={window}, shorter than the context of "
        f"{max_positions})": window is not None and window < max_positions,
        "sliding-window attention (layer_types)": any(
            kind != "full_attention" for kind in get("layer_types") or ()
        ),
    }
    for what, present in reasons.items():
        if present:
            raise keys.error(f"the model has {what}, which is not supported yet")


def _rope(keys: Keys, max_positions: int) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_scaling` beside `rope_theta` (before it)."""
    given = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise keys.error(f"rope_scaling must be an object, not {given!r}")
    own = Keys(keys.file, given)
    kind = given.get("rope_type") or given.get("type") or "default"
    theta = own.positive("rope_theta", keys.positive("rope_theta", 10_000.0))
    for part in (own, keys):
        if part.number("partial_rotary_factor", 1.0) != 1.0:
            raise keys.error("rotating a part of the head (partial_rotary_factor) isn't supported")
    original = own.integer(
        "original_max_position_embeddings",
        keys.integer("original_max_position_embeddings", max_positions),
    )
    match kind:
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, kind="linear", factor=own.positive("factor"))
        case "dynamic":
            return RopeConfig(
                theta=theta,
                kind="dynamic",
                factor=own.positive("factor"),
                original_max_positions=max_positions,  # as transformers: not the original_... key
            )
        case "llama3":
            return RopeConfig(
                theta=theta,
                kind="llama3",
                factor=own.positive("factor"),
                original_max_positions=original,
                low_freq_factor=own.number("low_freq_factor"),
                high_freq_factor=own.number("high_freq_factor"),
            )
        case "yarn":
            return RopeConfig(
                theta=theta,
                kind="yarn",
                factor=own.positive("factor", max_positions / original),
                original_max_positions=original,
                beta_fast=own.number("beta_fast", 32.0),
                beta_slow=own.number("beta_slow", 1.0),
                attention_factor=own.optional("attention_factor"),
                mscale=own.optional("mscale"),
                mscale_all_dim=own.optional("mscale_all_dim"),
                truncate=bool(given.get("truncate", True)),
            )
    raise keys.error(f"RoPE scaling {kind!r} is not supported yet")


def read_generation(folder: Path) -> GenerationDefaults:
    """generation_config.json, with the ids of config.json where it doesn't give them."""
    config = _read(folder / "config.json")
    file = folder / "generation_config.json"
    keys = _read(file) if file.is_file() else Keys(file, {})
    bos = _ids(keys, "bos_token_id") or _ids(config, "bos_token_id")
    greedy = keys.get("do_sample") is False
    top_k = keys.optional("top_k")
    return GenerationDefaults(
        eos_ids=_ids(keys, "eos_token_id") or _ids(config, "eos_token_id"),
        bos_id=bos[0] if bos else None,
        temperature=0.0 if greedy else keys.optional("temperature"),
        top_p=keys.optional("top_p"),
        min_p=keys.optional("min_p"),
        repetition_penalty=keys.optional("repetition_penalty"),
        top_k=None if top_k is None else int(top_k),
    )


def _ids(keys: Keys, key: str) -> tuple[int, ...]:
    value = keys.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise keys.error(f"{key} must be a token id or a list of them, not {value!r}")
    return tuple(dict.fromkeys(ids))
