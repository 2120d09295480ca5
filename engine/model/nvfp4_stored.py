"""How folders hold matrices in NVFP4: two tools' names and conventions, and what they must say.

Both store codes and block scales alike. ModelOpt stores the tensor scale, to multiply with;
compressed-tensors (llm-compressor) stores its inverse, to divide by. Activations stay floats here:
the scales that a file has for them, and for an FP8 cache, aren't used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels import nvfp4
from engine.kernels.formats import Nvfp4Parts
from engine.model.keys import Keys
from engine.model.tensors import Shape
from engine.model.vocab_folder import read_json

log = logging.getLogger(__name__)

FLOATS = ("BF16", "F16", "F32")

FOR_ACTIVATIONS = (
    ".input_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
)
"""How the names of tensors end that only quantised activations and caches need."""

_SUPPORTED = (
    "supported are NVFP4 weights with blocks of 16, by ModelOpt (quant_algo NVFP4) or "
    "compressed-tensors (format nvfp4-pack-quantized)"
)


class Stored(NamedTuple):
    """What one tensor of a file must be; `types` are safetensors' names."""

    shape: Shape
    types: tuple[str, ...]


class Convention(NamedTuple):
    """What takes the place of a module's `weight`, and whether the tensor scale divides."""

    codes: str
    scale: str
    divides: bool

    def parts(self, name: str, shape: Shape) -> dict[str, Stored]:
        """The tensors that stand for the matrix `name`: codes, block scales, tensor scale."""
        module = name.removesuffix("weight")
        out, ins = shape
        return {
            module + self.codes: Stored((out, ins // 2), ("U8",)),
            module + "weight_scale": Stored((out, ins // nvfp4.BLOCK), ("F8_E4M3",)),
            module + self.scale: Stored((), ("F32",)),
        }

    def read(
        self, where: Path, name: str, codes: Tensor, blocks: Tensor, scale: Tensor
    ) -> Nvfp4Parts:
        """ValueError names a tensor whose scales are negative, NaN or out of any weight's range."""
        module = name.removesuffix("weight")
        given = float(scale)
        tensor = nvfp4.inverse_of(given) if self.divides else given
        # Beyond 1 weights would reach thousands; files with the other tool's convention are there.
        if not (math.isfinite(given) and 0 < tensor < 1):
            raise ValueError(
                f"{where}: tensor {module}{self.scale} is {given:g}, so weights would reach "
                f"{nvfp4.LARGEST * tensor:g}: it must be "
                + ("an inverse, above 1" if self.divides else "a factor, between 0 and 1")
                + "; is the config another tool's?"
            )
        bytes_ = blocks.view(torch.uint8)
        if (bytes_ >= 0x7F).any():
            raise ValueError(f"{where}: tensor {module}weight_scale holds negative values or NaN")
        return Nvfp4Parts(codes, bytes_, torch.full((len(codes),), tensor), None)


MODELOPT = Convention("weight", "weight_scale_2", divides=False)
COMPRESSED = Convention("weight_packed", "weight_global_scale", divides=True)


def read_convention(folder: Path) -> Convention | None:
    """Of a folder's config.json, or the hf_quant_config.json beside it; None: it isn't quantised.

    ValueError: quantised in another way, with what is supported.
    """
    file = folder / "config.json"
    found = read_json(file).get("quantization_config")
    if not found:
        file = folder / "hf_quant_config.json"
        found = read_json(file).get("quantization")
        if not found:
            return None
        if isinstance(found, dict):
            found = {"quant_method": "modelopt"} | found
    if not isinstance(found, dict):
        raise ValueError(f"{file}: quantization_config must be an object, not {found!r}")
    keys = Keys(file, found)
    match keys.get("quant_method"):
        case "modelopt" | "modelopt_fp4":
            _check_modelopt(keys)
            return MODELOPT
        case "compressed-tensors":
            _check_compressed(keys)
            return COMPRESSED
        case other:
            raise _refusal(keys, f"quant_method {other!r}")


def _refusal(keys: Keys, what: str) -> ValueError:
    return keys.error(f"a quantised checkpoint with {what}; {_SUPPORTED}")


def _check_modelopt(keys: Keys) -> None:
    algorithm = keys.get("quant_algo")
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise _refusal(keys, f"quant_algo {algorithm!r}")
    size = keys.get("group_size", nvfp4.BLOCK)
    if size != nvfp4.BLOCK:
        raise _refusal(keys, f"group_size {size!r}")
    for name, weights in _groups(keys).items():
        _check_weights(keys, name, weights)
    _say(keys)


def _check_compressed(keys: Keys) -> None:
    form = keys.get("format")
    if form != "nvfp4-pack-quantized":
        raise _refusal(keys, f"format {form!r}")
    for key in ("sparsity_config", "transform_config"):
        if keys.get(key):
            raise _refusal(keys, f"a {key}")
    groups = _groups(keys)
    if not groups:
        raise _refusal(keys, "no config_groups")
    for name, weights in groups.items():
        _check_weights(keys, name, weights)
    _say(keys)


def _groups(keys: Keys) -> dict[str, Mapping[str, Any]]:
    """Group -> what it says of weights."""
    groups = keys.get("config_groups", {})
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) and isinstance(group.get("weights"), dict)
        for group in groups.values()
    ):
        raise keys.error("config_groups must hold objects, each with its weights")
    return {name: group["weights"] for name, group in groups.items()}


def _check_weights(keys: Keys, group: str, weights: Mapping[str, Any]) -> None:
    wanted = {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK}
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise _refusal(keys, f"weights of {key} {weights.get(key)!r} ({group})")
    if weights.get("symmetric") is False:
        raise _refusal(keys, f"weights with zero points ({group})")


def _say(keys: Keys) -> None:
    log.info("%s: NVFP4 weights are kept; activations and cache stay floats", keys.file)


def quantization_config() -> dict[str, Any]:
    """What config.json says of weights that are written here: compressed-tensors, weights only."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": nvfp4.BLOCK,
        "symmetric": True,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
