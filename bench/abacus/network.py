"""Qwen3's decoder in plain torch, for training: the same names as its checkpoints have.

Nothing of the engine is used: `tests/bench/abacus` compares this forward pass with the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


@dataclass(frozen=True)
class Shape:
    """Sizes of a network."""

    vocabulary: int
    layers: int
    width: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class Normalise(Function):
    """RMSNorm; its own backward pass takes a third of the time that torch's does on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
        scale = (squares / x.shape[-1] + eps).rsqrt().to(x.dtype)
        unit = x * scale
        ctx.save_for_backward(unit, scale, weight)
        out: Tensor = unit * weight
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        unit, scale, weight = ctx.saved_tensors
        product = grad * unit
        along = (product @ weight)[..., None] / -weight.shape[0]
        back = torch.addcmul(grad * weight, unit, along).mul_(scale)
        return back, product.flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Normalise.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class Rotate(Function):
    """RoPE over halves of the head, [B, T, H, D]; its gradient turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turn(grads[0], cos, -sin), None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d = shape.head_dim
        self.q_proj = nn.Linear(shape.width, shape.q_heads * d, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.q_heads * d, shape.width, bias=False)
        self.q_norm = RMSNorm(d, eps=shape.eps)
        self.k_norm = RMSNorm(d, eps=shape.eps)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.shape.head_dim)
        q = rotated(self.q_norm(self.q_proj(x).view(heads)), *angles).transpose(1, 2)
        k = rotated(self.k_norm(self.k_proj(x).view(heads)), *angles).transpose(1, 2)
        v = self.v_proj(x).view(heads).transpose(1, 2)
        group = self.shape.q_heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        # On CPUs with matrix units twice as fast, backward included, as torch's fused attention.
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))  # [B * Hq, T, D]
        future = q.new_full((length, length), -torch.inf).triu(1)
        scores = torch.baddbmm(future, q, k.mT, alpha=self.shape.head_dim**-0.5)
        out = (scores.softmax(-1) @ v).view(batch, -1, length, self.shape.head_dim)
        joined: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return joined


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, eps=shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, eps=shape.eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """Tokens [B, T] -> logits [n, vocabulary] at the chosen places of [B, T]; the head is the
    embedding's transpose."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, eps=shape.eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.layers) ** -0.5 if last else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        angles = rotation(self.shape, x)
        for layer in self.layers:
            x = layer(x, angles)
        logits: Tensor = self.norm(x)[chosen] @ self.embed_tokens.weight.T
        return logits


def rotation(shape: Shape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions of x [B, T, ...], [1, T, 1, D] each."""
    half = torch.arange(0, shape.head_dim, 2, device=x.device) / shape.head_dim
    places = torch.arange(x.shape[1], device=x.device)
    angles = places[:, None] * shape.rope_theta**-half  # [T, D / 2]
    angles = torch.cat([angles, angles], -1)[None, :, None]
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([-second, first], -1), sin)
