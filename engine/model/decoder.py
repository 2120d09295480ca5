"""The decoder: Llama, Qwen2, Qwen3 and Mistral by flags. A batch is one flat run of tokens.

It knows no sequence and no page: positions come in with the step, and attention goes out to the
step's cache. A token's output has the same bits whatever tokens run beside it, as far as the
chosen backends keep a row's bits (see kernels/linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.dispatch import select
from engine.kernels.formats import DenseParts, Parts, moved, nbytes, stacked
from engine.kernels.layers import LAYERS, Layer, Layers, LayersShape, LayersSpec, StepKV
from engine.model.architecture import DecoderConfig
from engine.model.quantize import WEIGHT_FORMATS, Store, WeightFormat, as_floats
from engine.model.rope import Rope
from engine.model.tensors import Tensors
from engine.model.weights import Stored, Weight
from engine.model.workers import workers

Embed = Callable[[Tensor], Tensor]
"""ids [T] int64 -> [T, E]."""


class StepContext(NamedTuple):
    """What one forward pass needs beside its tokens."""

    positions: Tensor  # [T] int64, on the host
    kv: StepKV


class Decoder:
    """A model ready to run.

    `nbytes` is what its tensors hold in memory; an embedding looked up in a mapped file isn't held.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        rope: Rope,
        embed: Embed,
        layers: Layers,
        head: Weight,
        nbytes: int,
    ) -> None:
        self.config = config
        self.nbytes = nbytes
        self._dtype = dtype
        self._rope = rope
        self._embed = embed
        self._layers = layers
        self._head = head

    @classmethod
    def load(
        cls,
        checkpoint: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        prefer: Sequence[str] = (),
        weights: WeightFormat = WEIGHT_FORMATS["float"],
        activation_bits: int = 0,
        kv_bits: int = 0,
    ) -> Decoder:
        """`dtype` (of activations) float32 or bfloat16; `prefer` names backends to ask first.
        Matrices that the file has in NVFP4 stay as they are, whatever `weights`. `activation_bits`:
        8 or 16 where integer weights multiply rounded activations. `kv_bits`: those of the cache's
        packed cells, 0 if it has none.
        """
        loader = _Loader(
            checkpoint, dtype, torch.device(device), prefer, weights, activation_bits, kv_bits
        )
        return loader.decoder()

    def forward(self, ids: Tensor, ctx: StepContext) -> Tensor:
        """ids [T] int64 -> final-normed hidden states [T, E]."""
        cos, sin = self._rope.angles(ctx.positions)
        return self._layers(self._embed(ids).to(self._dtype), cos, sin, ctx.kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, E] -> [R, V] float32."""
        return self._head.matmul(hidden).float()


class _Loader:
    """Reads tensors by name, builds the parts side by side, and counts their bytes."""

    def __init__(
        self,
        checkpoint: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        prefer: Sequence[str],
        weights: WeightFormat,
        activation_bits: int,
        kv_bits: int,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float32 or torch.bfloat16, not {dtype}")
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.dtype = dtype
        self.device = device
        self.prefer = prefer
        self.weights = weights
        self.activation_bits = activation_bits
        self.kv_bits = kv_bits
        self.sizes: list[int] = []  # bytes of each tensor

    def decoder(self) -> Decoder:
        cfg = self.config
        shape = (cfg.vocab_size, cfg.hidden_size)
        name = "model.embed_tokens.weight"
        with workers() as pool:  # the head first: it's the largest, and its copy goes soonest
            ends = pool.submit(self._ends, name, shape)
            layers = list(pool.map(self._layer, range(cfg.layers)))
            embed, head = ends.result()
        norm = self._tensor("model.norm.weight", cfg.hidden_size)
        rope, run = Rope(cfg, self.device), self._run(layers, norm)
        return Decoder(cfg, self.dtype, rope, embed, run, head, sum(self.sizes))

    def _run(self, layers: Sequence[Layer], norm: Tensor) -> Layers:
        """All layers as one op, in the backend that serves what their matrices became."""
        cfg = self.config
        held = {m.linear.backend for x in layers for m in (x.qkv, x.out, x.gate_up, x.down)}
        kinds = (self.device.type, self.dtype, cfg.head_dim, frozenset(held))
        spec = LayersSpec(*kinds, self.kv_bits)
        shape = LayersShape(cfg.q_heads, cfg.kv_heads, cfg.head_dim, cfg.norm_eps)
        return cast(Layers, select(LAYERS, spec, self.prefer).build(shape, layers, norm))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.checkpoint.tensor(name, shape).to(device=self.device, dtype=self.dtype)
        self.sizes.append(tensor.nbytes)
        return tensor

    def _ends(self, name: str, shape: tuple[int, int]) -> tuple[Embed, Weight]:
        """Embedding and LM head. On CPU rows are looked up in the file; elsewhere in a table, which
        a tied head shares if it is held in the same dtype."""
        tied = self.config.tied_embeddings
        parts = self._parts({name if tied else "lm_head.weight": shape}, None, self.weights.head)
        head = self._stored(parts)
        if self.device.type == "cpu":
            return self.checkpoint.rows(name, shape), head
        if tied and isinstance(parts, DenseParts) and parts.weight.dtype == self.dtype:
            table = parts.weight
        else:
            table = self._tensor(name, *shape)
        return lambda ids: F.embedding(ids, table), head

    def _stack(
        self,
        prefix: str,
        outs: dict[str, int],
        ins: int,
        *,
        bias: bool = False,
        gated: bool = False,
    ) -> Stored:
        """Several projections of one input as one weight, rows in the order of `outs`."""
        biases = [
            self.checkpoint.tensor(f"{prefix}{n}.bias", (out,)) for n, out in outs.items() if bias
        ]
        shapes = {f"{prefix}{n}.weight": (out, ins) for n, out in outs.items()}
        whole = torch.cat(biases).to(self.dtype) if bias else None
        parts = self._parts(shapes, whole, self.weights.layers)
        return self._stored(parts, gated=gated)

    def _stored(self, parts: Parts, *, gated: bool = False) -> Stored:
        bits = self.activation_bits
        return Stored(parts, self.dtype, self.prefer, gated=gated, activation_bits=bits)

    def _parts(
        self, shapes: dict[str, tuple[int, int]], bias: Tensor | None, store: Store
    ) -> Parts:
        """Matrices of the same inputs as one. In NVFP4 they share a tensor scale, unless the file
        has them so, each with its own; where it has only some so, all become floats."""
        packed = [self.checkpoint.packed(name, shape) for name, shape in shapes.items()]
        stored = [p for p in packed if p is not None]
        if len(stored) == len(packed):
            parts: Parts = stacked(stored, bias)
        else:
            matrices = [
                self.checkpoint.tensor(name, shape) if p is None else p.dense(self.dtype)
                for p, (name, shape) in zip(packed, shapes.items(), strict=True)
            ]
            whole = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
            try:
                parts = (as_floats if stored else store)(whole, bias, self.dtype)
            except ValueError as error:
                raise ValueError(f"{', '.join(shapes)}: {error}") from error
        parts = moved(parts, self.device)
        self.sizes.append(nbytes(parts))
        return parts

    def _layer(self, index: int) -> Layer:
        cfg, prefix = self.config, f"model.layers.{index}."
        attn, mlp = prefix + "self_attn.", prefix + "mlp."
        hidden, inner = cfg.hidden_size, cfg.intermediate_size
        q, kv = cfg.q_heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
        qkv = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return Layer(
            attn_norm=self._tensor(prefix + "input_layernorm.weight", hidden),
            qkv=self._stack(attn, qkv, hidden, bias=cfg.qkv_bias),
            qk_norm=self._qk_norm(attn) if cfg.qk_norm else None,
            out=self._stack(attn, {"o_proj": hidden}, q, bias=cfg.out_bias),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._stack(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, gated=True),
            down=self._stack(mlp, {"down_proj": hidden}, inner),
        )

    def _qk_norm(self, prefix: str) -> Tensor:
        cfg = self.config
        q = self._tensor(prefix + "q_norm.weight", cfg.head_dim).expand(cfg.q_heads, -1)
        k = self._tensor(prefix + "k_norm.weight", cfg.head_dim).expand(cfg.kv_heads, -1)
        return torch.cat((q, k))
