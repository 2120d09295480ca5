"""The tensors that a decoder needs: Hugging Face names and shapes, and their check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from engine.kernels.formats import Nvfp4Parts
from engine.model.architecture import DecoderConfig

Shape = tuple[int, ...]


class Tensors(Protocol):
    """All that a decoder sees of a checkpoint: its numbers, by Hugging Face's names."""

    @property
    def config(self) -> DecoderConfig: ...

    def tensor(self, name: str, shape: Shape) -> Tensor:
        """A tensor in the file's float type, or float32 where the file has blocks.

        It may be a view of the mapped file: never write to it. ValueError names file, tensor and
        shapes when it is missing or of another shape.
        """

    def packed(self, name: str, shape: Shape) -> Nvfp4Parts | None:
        """A matrix that the file holds in NVFP4, without its bias; None: it's to be had as floats.

        ValueError as for `tensor`, or where its scales can't be right.
        """

    def rows(self, name: str, shape: Shape) -> Callable[[Tensor], Tensor]:
        """ids [n] int64 on CPU -> rows [n, E] of an embedding that stays in the file."""


def tensor_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Every tensor that `config` asks for; matrices are [out, in]."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    layer = _layer_shapes(config)
    for i in range(config.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def needed_shapes(file: object, config: DecoderConfig, held: int) -> dict[str, Shape]:
    """`tensor_shapes` for a file of `held` tensors; a corrupt number of layers ends here."""
    if config.layers > held:
        raise ValueError(
            f"{file}: holds {held} tensors, too few for the {config.layers} layers of its config"
        )
    return tensor_shapes(config)


def _layer_shapes(config: DecoderConfig) -> dict[str, Shape]:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    outs = {
        "q": config.q_heads * width,
        "k": config.kv_heads * width,
        "v": config.kv_heads * width,
    }
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, outs["q"]),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for name, out in outs.items():
        shapes[f"self_attn.{name}_proj.weight"] = (out, hidden)
        if config.qkv_bias:
            shapes[f"self_attn.{name}_proj.bias"] = (out,)
    if config.out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
    return shapes


def check_shape(file: object, name: str, found: Shape, wanted: Shape) -> None:
    """ValueError that names file, tensor and both shapes when they differ."""
    if found != wanted:
        raise ValueError(
            f"{file}: tensor {name} has shape {list(found)}, the model's config needs "
            f"{list(wanted)}"
        )


def check_names(file: object, found: Iterable[str], wanted: Mapping[str, Shape]) -> None:
    """ValueError when a wanted tensor is missing, or one is there that would go unused."""
    names = set(found)
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{file}: tensor {_some(missing)} missing; is the download complete?")
    if extra := sorted(names - wanted.keys()):
        raise ValueError(
            f"{file}: tensor {_some(extra)} not part of the architecture that its config names, "
            "so the model would answer wrongly without it"
        )


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
