"""One decoder's numbers and flags, whatever file they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and how it's stretched.

    `kind` names the scaling; the other fields are those that it reads, by Hugging Face's names.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Llama, Qwen2, Qwen3 and Mistral differ by these flags alone."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig = RopeConfig()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False


def reach(rope: RopeConfig, max_positions: int) -> int:
    """The positions that a model can use, where its file counts those before stretching."""
    match rope.kind:
        case "dynamic" | "yarn":
            assert rope.original_max_positions is not None
            return max(max_positions, int(rope.factor * rope.original_max_positions))
        case _:
            return max_positions


def uneven_heads(config: DecoderConfig) -> str | None:
    """Why the numbers of its heads can't be, in words."""
    if config.q_heads % config.kv_heads or config.head_dim % 2:
        return (
            f"{config.q_heads} attention heads of size {config.head_dim} over {config.kv_heads} "
            "kv heads: the heads must divide evenly and their size be even"
        )
    return None
