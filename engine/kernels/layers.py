"""A model's decoder layers as one op: at one stream, calls of their parts would cost more than the
work in them.

The reference composes the parts: norm, projection, rotation, the step's cache, projection, gated
MLP. A backend that runs all layers at once appends and attends by itself: from `StepCells`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.dispatch import Op
from engine.kernels.linear import Linear
from engine.kernels.packed import PackedCells


class Matrix(Protocol):
    """What a layer sees of a weight."""

    @property
    def linear(self) -> Linear: ...

    def matmul(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights: q, k, v in one matrix; `gate_up` gives silu(gate) * up."""

    attn_norm: Tensor  # [E]
    qkv: Matrix
    qk_norm: Tensor | None  # [Hq + H, D], one row a head
    out: Matrix
    mlp_norm: Tensor  # [E]
    gate_up: Matrix
    down: Matrix


class LayersSpec(NamedTuple):
    """What a backend must serve; `linears` are the backends that hold the layers' matrices, `bits`
    those of packed cells, 0 where there are none."""

    device: str
    dtype: torch.dtype
    head_dim: int
    linears: frozenset[str]
    bits: int = 0


class LayersShape(NamedTuple):
    """The numbers that all layers share."""

    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float


class StepCells(NamedTuple):
    """A step's rows and the cache that they are appended to, before any layer has run.

    Row r is slot slots[r] and has counts[r] tokens, from position starts[r] on; the tables don't
    count them yet, but have pages for them. Queries of tokens with ring_at >= 0 go to that row of
    each layer's ring.
    """

    k: Tensor  # [pages, 16, D]
    v: Tensor
    pos: Tensor  # [pages, 16] int32
    table: NDArray[np.int32]  # [slots, L, H, P]
    lengths: NDArray[np.int32]  # [slots, L, H]
    slots: NDArray[np.int64]  # [R]
    starts: NDArray[np.int64]  # [R]
    counts: NDArray[np.int64]  # [R]
    ring: Tensor | None  # [L, rows, Hq, D]
    ring_at: NDArray[np.int64] | None  # [T]
    bias: Tensor | None = None  # [pages, 16] float32, 0 for the step's own cells
    packed: PackedCells | None = None  # table and fill are [slots, L, H, G]


class StepKV(Protocol):
    """One step's cache: layers either attend one by one, or all by themselves from `cells`."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v [T, H, D], then attend with q [T, Hq, D], all rotated: [T, Hq, D]."""

    def cells(self) -> StepCells: ...


class Layers(Protocol):
    """All layers of one model, and the norm behind them."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: StepKV) -> Tensor:
        """x [T, E], cos and sin [T, D / 2] float32 -> [T, E]; x may be overwritten."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by its T positions' angles [T, D / 2]: dimension i with i + D / 2, as
    Hugging Face checkpoints expect. Rounded once, to x's dtype."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


LAYERS: Op[LayersSpec] = Op("layers")
"""`build(shape, layers, norm [E])` gives a `Layers`."""


@LAYERS.register("reference", refuses=lambda spec: None)
class ComposedLayers:
    """Part after part, in whatever backends the parts have."""

    def __init__(self, shape: LayersShape, layers: Sequence[Layer], norm: Tensor) -> None:
        self._shape = shape
        self._layers = layers
        self._norm = norm

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, kv: StepKV) -> Tensor:
        q_heads, kv_heads, dim, eps = self._shape
        rotated = q_heads + kv_heads
        for index, layer in enumerate(self._layers):
            heads = layer.qkv.matmul(F.rms_norm(x, layer.attn_norm.shape, layer.attn_norm, eps))
            heads = heads.view(-1, rotated + kv_heads, dim)  # [T, Hq + 2 H, D]
            qk, v = heads[:, :rotated], heads[:, rotated:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (dim,), None, eps) * layer.qk_norm
            qk = rotate(qk, cos, sin)
            seen = kv.attend(index, qk[:, :q_heads], qk[:, q_heads:], v)
            x = x + layer.out.matmul(seen.flatten(1))
            normed = F.rms_norm(x, layer.mlp_norm.shape, layer.mlp_norm, eps)
            x = x + layer.down.matmul(layer.gate_up.matmul(normed))
        return F.rms_norm(x, self._norm.shape, self._norm, eps)
