"""What can be said of a model on a command line, declared once: for `taut serve` and the others.

Plain dataclasses, whose types carry each option's words; flags are made from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_type_hints

from engine.request import MAIN, SamplingParams

if TYPE_CHECKING:
    from engine.cache.policy import KVSpec
    from engine.config import EngineConfig

MODEL, CACHE, LOAD, SAMPLING = "model", "KV cache", "load", "sampling"


class Words(NamedTuple):
    """How an option looks; `group` is the heading that a long help lists it under."""

    help: str
    group: str
    metavar: str = ""


class Option(NamedTuple):
    """A dataclass field that is an option."""

    name: str
    kind: Any
    default: Any
    words: Words


def options_of(declared: type) -> Iterator[Option]:
    """In the order of declaration."""
    hints = get_type_hints(declared, include_extras=True)
    for field in fields(declared):
        kind, *extras = get_args(hints[field.name])
        (words,) = (extra for extra in extras if isinstance(extra, Words))
        yield Option(field.name, kind, field.default, words)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model, and how it is run. What the values may be is checked by the engine's own config."""

    model: Annotated[
        str, Words("a packaged name, a Hugging Face folder, a GGUF file or a hub id", MODEL)
    ] = "abacus"
    weights: Annotated[
        str,
        Words(
            "held as float (as stored), bf16, int8 or nvfp4; rtn8 to rtn2 only round",
            MODEL,
            "FORMAT",
        ),
    ] = "float"
    activations: Annotated[
        str, Words("before int8 and nvfp4 weights: float, int16 or int8", MODEL, "FORMAT")
    ] = "float"
    dtype: Annotated[
        str, Words("of what is computed: auto, float32 or bfloat16", MODEL, "DTYPE")
    ] = "auto"
    max_model_len: Annotated[
        int | None, Words("longest prompt and output together (the model's own)", MODEL, "TOKENS")
    ] = None
    generation_defaults: Annotated[bool, Words("use the model's own sampling defaults", MODEL)] = (
        True
    )
    kv_policy: Annotated[
        str | None,
        Words("bound the cache: 'snapkv', 'sinks_recent(sinks=4)' (full cache)", CACHE, "POLICY"),
    ] = None
    kv_allocation: Annotated[
        str | None,
        Words("cells by layer and head: 'reasonalloc', 'adakv(safe=0.2)' (even)", CACHE, "NAME"),
    ] = None
    kv_budget: Annotated[
        int | None, Words("cells that a head keeps after a compaction", CACHE, "CELLS")
    ] = None
    kv_budget_bytes: Annotated[
        int | None, Words("bytes of a sequence's cells instead of --kv-budget", CACHE, "BYTES")
    ] = None
    kv_format: Annotated[
        str,
        Words(
            "cells as auto, fp32, bf16; packed: int8, int4, int2; or calibrated", CACHE, "FORMAT"
        ),
    ] = "auto"
    kv_tail: Annotated[
        int, Words("last cells of a head that packed formats leave plain", CACHE, "CELLS")
    ] = 64
    kv_tail_format: Annotated[
        str, Words("plain cells beside packed ones: auto, fp32 or bf16", CACHE, "FORMAT")
    ] = "auto"
    kv_window: Annotated[int, Words("cells appended between compactions", CACHE, "CELLS")] = 128
    threads: Annotated[
        int | None, Words("CPU threads (the CPUs that this process may use)", LOAD, "N")
    ] = None

    def kv(self) -> KVSpec:
        """ValueError: names that don't exist, or that don't go together."""
        from engine.cache.policy import KVSpec
        from engine.cache.registry import allocation_from_text, policy_from_text

        if self.kv_policy and self.kv_budget is None and self.kv_budget_bytes is None:
            raise ValueError(
                "--kv-policy needs --kv-budget, the cells that a head keeps, or --kv-budget-bytes"
            )
        return KVSpec(
            format=self.kv_format,  # type: ignore[arg-type]
            tail_tokens=self.kv_tail,
            tail_format=self.kv_tail_format,  # type: ignore[arg-type]
            policy=None if self.kv_policy is None else policy_from_text(self.kv_policy),
            allocation=allocation_from_text(self.kv_allocation or "uniform"),
            budget_tokens=self.kv_budget,
            budget_bytes=self.kv_budget_bytes,
            window=self.kv_window,
        )

    def config(self, **more: Any) -> EngineConfig:
        """An engine of this one model; `more` is EngineConfig's. ValueError."""
        from engine.config import EngineConfig, ModelSpec

        spec = ModelSpec(
            self.model,
            dtype=self.dtype,  # type: ignore[arg-type]
            kv=self.kv(),
            generation_defaults=self.generation_defaults,
            weights=self.weights,
            activations=self.activations,
        )
        return EngineConfig(
            models={MAIN: spec}, max_model_len=self.max_model_len, threads=self.threads, **more
        )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer is sampled."""

    max_tokens: Annotated[int, Words("tokens of one answer at most", SAMPLING, "N")] = 1024
    temperature: Annotated[
        float | None, Words("0 is greedy (the model's own default)", SAMPLING, "T")
    ] = None
    top_p: Annotated[float | None, Words("nucleus sampling", SAMPLING, "P")] = None
    top_k: Annotated[int | None, Words("only the k best tokens", SAMPLING, "K")] = None
    min_p: Annotated[
        float | None, Words("only tokens at least this share of the best", SAMPLING, "P")
    ] = None
    seed: Annotated[int | None, Words("makes sampling reproducible", SAMPLING, "N")] = None
    thinking_budget: Annotated[
        int | None, Words("close the thinking after this many tokens", SAMPLING, "TOKENS")
    ] = None

    def params(self, **more: Any) -> SamplingParams:
        """ValueError names what is out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            thinking_token_budget=self.thinking_budget,
            **more,
        )
