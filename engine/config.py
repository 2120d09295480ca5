"""EngineConfig and ModelSpec: compose the parts' own configs, and refuse what can't work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from engine.cache.policy import KVSpec
from engine.model.quantize import ACTIVATIONS, WEIGHT_FORMATS
from engine.request import MAIN, Role
from engine.scheduler.controller import Controller


@dataclass(frozen=True, kw_only=True)
class ReasoningSpec:
    """How a model thinks, as text: the markers round its chain, and what ends a chain early.

    Without markers (plain instruct models) the chain is what stands before the answer marker, and
    `closing` is a phrase that makes the model answer.
    """

    start: str | None = None
    end: str | None = None
    closing: str | None = None

    def __post_init__(self) -> None:
        for name in ("start", "end", "closing"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value.strip()):
                raise ValueError(f"reasoning.{name} must be text or None, not {value!r}")
        if (self.start is None) != (self.end is None):
            raise ValueError(
                "reasoning.start and reasoning.end are given together or not at all, not "
                f"start={self.start!r} and end={self.end!r}"
            )


@dataclass(frozen=True)
class ModelSpec:
    """One role's model: where it comes from and how it is held.

    `model` is a packaged name ("smollm2"), a Hugging Face folder, a GGUF file or a hub id. `dtype`
    auto: float32 on a CPU (exact, and the fastest for batches without bf16 instructions), bfloat16
    on a GPU. `reasoning` None: detected from the vocabulary. `generation_defaults` False: ignore
    the model's own sampling defaults (its end-of-sequence ids still count). `weights` is the number
    format that matrices are held in (docs/formats.md): nvfp4, int8, bf16, or "float", which is
    `dtype`, or NVFP4 where the files hold that; rtn8 to rtn2 are `dtype` with rounded values.
    `activations` int16 or int8: rounded before they meet weights in int8 or NVFP4, whose products
    are integers then, several times as fast for many rows.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    kv: KVSpec = field(default_factory=KVSpec)
    reasoning: ReasoningSpec | None = None
    generation_defaults: bool = True
    weights: str = "float"
    activations: str = "float"

    def __post_init__(self) -> None:
        for name, kind in (("model", str), ("device", str), ("generation_defaults", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if self.reasoning is not None and not isinstance(self.reasoning, ReasoningSpec):
            raise ValueError(f"reasoning must be a ReasoningSpec or None, not {self.reasoning!r}")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32 or bfloat16, not {self.dtype!r}")
        if not isinstance(self.weights, str) or self.weights not in WEIGHT_FORMATS:
            raise ValueError(
                f"weights must be one of {', '.join(WEIGHT_FORMATS)}, not {self.weights!r}"
            )
        if self.activations not in ACTIVATIONS:
            raise ValueError(
                f"activations must be one of {', '.join(ACTIVATIONS)}, not {self.activations!r}"
            )
        if not isinstance(self.kv, KVSpec):
            raise ValueError(f"kv must be a KVSpec, not {self.kv!r}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """A whole engine.

    `kv_bytes` is shared by the roles in proportion to what a token costs each; None: half of the
    memory that cgroup and machine leave once the weights are in, at most what `max_num_seqs`
    sequences of `max_model_len` could use. `max_model_len` None: the model's own. `threads` None:
    the CPUs that this process may use. `backends` are kernel backends to ask first, in order.
    """

    models: Mapping[Role, ModelSpec]
    controllers: tuple[Controller, ...] = ()
    kv_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 512
    threads: int | None = None
    backends: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_models(self.models)
        for name in ("kv_bytes", "max_model_len", "threads", "max_num_seqs", "max_batched_tokens"):
            value = getattr(self, name)
            needed = name.startswith("max_") and name != "max_model_len"
            if (value is not None or needed) and not _positive(value):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        if self.max_batched_tokens < 2 * self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least twice "
                f"max_num_seqs ({self.max_num_seqs}), or decoding would starve prompts"
            )
        for name in ("controllers", "backends"):
            if not isinstance(getattr(self, name), tuple | list):
                raise ValueError(f"{name} must be a tuple, not {getattr(self, name)!r}")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise ValueError(f"seed must be an integer or None, not {self.seed!r}")
        for controller in self.controllers:
            _check_controller(controller, self.models)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_models(models: Mapping[Role, ModelSpec]) -> None:
    if not isinstance(models, Mapping) or MAIN not in models:
        raise ValueError(
            'models must name a "main" role, as in {"main": ModelSpec("smollm2")}, '
            f"not {models!r}"
        )
    for role, spec in models.items():
        if not isinstance(spec, ModelSpec):
            raise ValueError(f"models[{role!r}] must be a ModelSpec, as ModelSpec({spec!r}) is")


def _check_controller(controller: Controller, models: Mapping[Role, ModelSpec]) -> None:
    if not isinstance(controller, Controller):
        raise ValueError(f"controllers must hold Controller values, not {controller!r}")
    name = type(controller).__name__
    missing = {*controller.roles, *controller.children} - set(models)
    if missing:
        raise ValueError(
            f"{name} uses the roles {sorted(missing)}, which models doesn't name; it has "
            f"{sorted(models)}"
        )
    if getattr(controller, "probe", None) is not None:
        raise ValueError(f"{name} asks for a probe of hidden states, which isn't supported yet")
