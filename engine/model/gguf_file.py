"""A GGUF file: memory-mapped, dequantised tensor by tensor, under Hugging Face's names."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model.architecture import DecoderConfig
from engine.model.gguf_blocks import FLOATS, dequantise, supported
from engine.model.gguf_config import read_config, read_generation
from engine.model.gguf_header import TensorInfo, read_header
from engine.model.tensors import Shape, check_names, check_shape, needed_shapes

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE = "rope_freqs.weight"


def _stored_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight."""
    part, kind = name.rsplit(".", 1)
    if part in _TOP:
        return f"{_TOP[part]}.{kind}"
    _, _, layer, rest = part.split(".", 3)
    return f"blk.{layer}.{_LAYER[rest]}.{kind}"


class GGUFFile:
    """A Checkpoint over one file. Float types are views of the map, block types float32 copies."""

    folder = None
    stored_format = None

    def __init__(self, file: Path, source: str) -> None:
        self.source = source
        self.path = file
        self._header = read_header(file)
        self._bytes = torch.frombuffer(self._header.data, dtype=torch.uint8)
        divisors = self._info(_ROPE) if _ROPE in self._header.tensors else None
        self.config: DecoderConfig = read_config(
            self._header, None if divisors is None else self._values(divisors)
        )
        self.generation = read_generation(self._header.metadata)
        self.metadata: Mapping[str, Any] | None = self._header.metadata

    def check(self) -> None:
        """Raise ValueError unless all that `config` asks for is there and fits."""
        file, held = self._header.file, self._header.tensors.keys() - {_ROPE}
        shapes = needed_shapes(file, self.config, len(held))
        wanted = {_stored_name(name): shape for name, shape in shapes.items()}
        check_names(file, held, wanted)
        for name, shape in wanted.items():
            check_shape(file, name, self._info(name).shape, shape)

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """The tensor as floats, after a check of its shape."""
        info = self._checked(name, shape)
        values = self._values(info, self._row_order(name))
        if info.kind not in FLOATS:  # a copy: its bytes needn't stay in memory
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._header.data.madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)
        return values

    def packed(self, name: str, shape: Shape) -> None:
        """Blocks of this file are to be had as floats only."""

    def rows(self, name: str, shape: Shape) -> Callable[[Tensor], Tensor]:
        """ids [n] -> the tensor's rows [n, E]; only those rows are read and dequantised."""
        info = self._checked(name, shape)
        return lambda ids: self._values(info, ids)

    def _checked(self, name: str, shape: Shape) -> TensorInfo:
        info = self._info(_stored_name(name))
        check_shape(self._header.file, info.name, info.shape, shape)
        return info

    def _info(self, name: str) -> TensorInfo:
        info = self._header.tensors.get(name)
        if info is None:
            raise ValueError(f"{self._header.file}: tensor {name} is missing")
        if not supported(info.kind) or (len(info.shape) == 1 and info.kind not in FLOATS):
            raise ValueError(
                f"{self._header.file}: tensor {name} of shape {list(info.shape)} is of type "
                f"{info.kind.name}, which is not supported"
            )
        return info

    def _values(self, info: TensorInfo, order: Tensor | None = None) -> Tensor:
        """All of the tensor's rows, or those that `order` names."""
        raw = self._bytes[info.start : info.start + info.nbytes]
        if info.kind in FLOATS:
            values = raw.view(FLOATS[info.kind]).view(info.shape)
            return values if order is None else values.index_select(0, order)
        rows = raw.view(info.shape[0], -1)
        return dequantise(rows if order is None else rows.index_select(0, order), info.kind)

    def _row_order(self, name: str) -> Tensor | None:
        """Where the rows of q and k lie in the file.

        The converter for "llama" interleaves the two halves of a head that rotate together: its row
        2 i + h of a head is row h D/2 + i here. A permutation of rows leaves their blocks whole.
        """
        heads = {"q_proj": self.config.q_heads, "k_proj": self.config.kv_heads}
        part = name.split(".")[-2]
        if self.config.family != "llama" or part not in heads:
            return None
        width = self.config.head_dim
        order = torch.arange(heads[part] * width).view(heads[part], width // 2, 2)
        return order.transpose(1, 2).reshape(-1)
