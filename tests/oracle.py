"""The truth: a dense decoder in float32 without a cache, written apart from the engine's.

It shares only the config and the tensors, by Hugging Face names. `keep` says which cells each
query may still see, so that a compacted cache can be compared with it, mask for mask.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.architecture import DecoderConfig

Keep = Tensor | Callable[[int], Tensor]
"""[L, H, T, T] bool (layer, kv head, query, key), or a function from the layer to [H, T, T]."""


class Refit(NamedTuple):
    """Biases, and values in place of the model's own, that queries from `start` on meet."""

    start: int
    there: Tensor  # [L, H, T] bool, the keys that have them
    bias: Tensor  # [L, H, T]
    v: Tensor  # [L, H, T, D]


def frequency(config: DecoderConfig, pair: int, position: int) -> float:
    """Radians a position of dimensions (pair, pair + D / 2), for a token at `position`."""
    rope, dim = config.rope, config.head_dim
    context = rope.original_max_positions or config.max_positions
    plain = math.pow(rope.theta, -2 * pair / dim)
    wavelength = 2 * math.pi / plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "dynamic":
        stretch = rope.factor * max(position + 1, context) / context - rope.factor + 1
        base = rope.theta * math.pow(stretch, dim / (dim - 2))
        return math.pow(base, -2 * pair / dim)
    if rope.kind == "llama3":
        if wavelength < context / rope.high_freq_factor:
            return plain
        if wavelength > context / rope.low_freq_factor:
            return plain / rope.factor
        smooth = context / wavelength - rope.low_freq_factor
        smooth /= rope.high_freq_factor - rope.low_freq_factor
        return (1 - smooth) * plain / rope.factor + smooth * plain
    if rope.kind == "yarn":
        ends = [
            dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        ]
        low, high = (math.floor(ends[0]), math.ceil(ends[1])) if rope.truncate else ends
        low, high = max(low, 0), min(high, dim - 1)
        share = min(max((pair - low) / ((high - low) or 0.001), 0.0), 1.0)
        return share * plain / rope.factor + (1 - share) * plain
    return plain


def loudness(config: DecoderConfig) -> float:
    """What rotated vectors are multiplied with."""
    rope = config.rope
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    scales = (rope.mscale, rope.mscale_all_dim)
    above, below = scales if scales[0] and scales[1] else (1.0, 0.0)
    return (1 + 0.1 * (above or 0) * math.log(rope.factor)) / (
        1 + 0.1 * (below or 0) * math.log(rope.factor)
    )


def rotate(config: DecoderConfig, x: Tensor) -> Tensor:
    """x [heads, T, D] at positions 0 .. T - 1, as a complex product."""
    half = config.head_dim // 2
    angle = torch.tensor(
        [[t * frequency(config, p, t) for p in range(half)] for t in range(x.shape[1])]
    )  # [T, D / 2]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones(()), angle)
    return torch.cat((turned.real, turned.imag), -1) * loudness(config)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def logits(
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    ids: Tensor,
    keep: Keep | None = None,
    refits: Sequence[Refit] = (),
) -> Tensor:
    """ids [T] -> [T, V] float32. Of the refits, in order of their starts, the last that has begun
    counts."""
    w = {name: tensor.float() for name, tensor in tensors.items()}
    size, eps = len(ids), config.norm_eps

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(()))

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config.layers):
        at = f"model.layers.{layer}."
        h = norm(x, w[at + "input_layernorm.weight"], eps)
        q, k, v = (
            linear(f"{at}self_attn.{p}_proj", h).view(size, -1, config.head_dim).transpose(0, 1)
            for p in "qkv"
        )
        if config.qk_norm:
            q = norm(q, w[at + "self_attn.q_norm.weight"], eps)
            k = norm(k, w[at + "self_attn.k_norm.weight"], eps)
        group = config.q_heads // config.kv_heads
        q, k = rotate(config, q), rotate(config, k).repeat_interleave(group, 0)
        seen = torch.ones(size, size, dtype=torch.bool).tril().expand(config.kv_heads, -1, -1)
        if keep is not None:
            seen = seen & (keep(layer) if callable(keep) else keep[layer])
        scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)  # [Hq, T, T]
        scores = scores.masked_fill(~seen.repeat_interleave(group, 0), -math.inf)
        heads = torch.softmax(scores, -1) @ v.repeat_interleave(group, 0)
        for refit in refits:
            there, bias = refit.there[layer, :, :size], refit.bias[layer, :, :size]
            values = torch.where(there[..., None], refit.v[layer, :, :size], v)
            added = torch.where(there, bias, 0.0).repeat_interleave(group, 0)[:, None]
            weights = torch.softmax(scores[:, refit.start :] + added, -1)
            heads[:, refit.start :] = weights @ values.repeat_interleave(group, 0)
        x = x + linear(at + "self_attn.o_proj", heads.transpose(0, 1).reshape(size, -1))
        h = norm(x, w[at + "post_attention_layernorm.weight"], eps)
        gate, up = linear(at + "mlp.gate_proj", h), linear(at + "mlp.up_proj", h)
        x = x + linear(at + "mlp.down_proj", gate * torch.sigmoid(gate) * up)
    head = "model.embed_tokens" if config.tied_embeddings else "lm_head"
    return linear(head, norm(x, w["model.norm.weight"], eps))
