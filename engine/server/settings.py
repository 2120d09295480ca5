"""Everything `taut serve` can be told, once: flags, the same names in a YAML or TOML file.

A field's description is its help, its group the heading that it's listed under. Names are vLLM's
where the meaning is the same. What the command line says wins over the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.cache.policy import KVSpec
from engine.cache.registry import policy_from_text
from engine.config import EngineConfig, ModelSpec
from engine.request import MAIN

KEY_VARIABLE = "TAUT_API_KEY"


class Flag(NamedTuple):
    """How a field looks on the command line."""

    group: str
    metavar: str = ""


MODEL, CACHE, LOAD, HTTP, LIMITS = "model", "KV cache", "load", "HTTP", "limits"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """A server's whole configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Flag(MODEL)] = Field(
        default="smollm2",
        description="a packaged name, a Hugging Face folder, a GGUF file or a hub id",
    )
    served_model_name: Annotated[tuple[str, ...], Flag(MODEL, "NAME")] = Field(
        default=(), description="the name that clients ask for; repeatable (MODEL)"
    )
    weights: Annotated[str, Flag(MODEL, "FORMAT")] = Field(
        default="float", description="float (as stored), bf16, int8 or nvfp4"
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Flag(MODEL)] = Field(
        default="auto", description="of activations"
    )
    max_model_len: Annotated[Positive | None, Flag(MODEL, "TOKENS")] = Field(
        default=None, description="longest prompt and output together (the model's own)"
    )
    generation_defaults: Annotated[bool, Flag(MODEL)] = Field(
        default=True, description="use the model's own sampling defaults"
    )
    kv_policy: Annotated[str | None, Flag(CACHE, "POLICY")] = Field(
        default=None, description="bound the cache: 'snapkv', 'sinks_recent(sinks=4)' (full cache)"
    )
    kv_budget: Annotated[Positive | None, Flag(CACHE, "CELLS")] = Field(
        default=None, description="cells that a head keeps after a compaction"
    )
    kv_window: Annotated[Positive, Flag(CACHE, "CELLS")] = Field(
        default=128, description="cells appended between compactions"
    )
    kv_cache_memory_bytes: Annotated[Positive | None, Flag(CACHE, "BYTES")] = Field(
        default=None, description="memory of all caches (half of what the weights leave)"
    )
    max_num_seqs: Annotated[Positive, Flag(LOAD, "N")] = Field(
        default=64, description="sequences that run at once"
    )
    max_num_batched_tokens: Annotated[Positive | None, Flag(LOAD, "TOKENS")] = Field(
        default=None, description="tokens of one step (512, or twice --max-num-seqs)"
    )
    max_queued: Annotated[int, Flag(LOAD, "N")] = Field(
        default=256, ge=0, description="sequences that may wait; more are answered 429"
    )
    threads: Annotated[Positive | None, Flag(LOAD, "N")] = Field(
        default=None, description="CPU threads (the CPUs that this process may use)"
    )
    seed: Annotated[int | None, Flag(LOAD, "N")] = Field(
        default=None, description="makes requests without a seed reproducible"
    )
    host: Annotated[str, Flag(HTTP)] = Field(
        default="127.0.0.1", description="0.0.0.0 takes requests from other machines"
    )
    port: Annotated[int, Flag(HTTP)] = Field(
        default=8000, ge=0, le=65535, description="0: any free one"
    )
    api_key: Annotated[tuple[str, ...], Flag(HTTP, "KEY")] = Field(
        default=(), description=f"clients must send it; repeatable; also ${KEY_VARIABLE} (none)"
    )
    allowed_origins: Annotated[tuple[str, ...], Flag(HTTP, "URL")] = Field(
        default=(), description="web pages that may call, CORS; repeatable, * for all (none)"
    )
    ssl_certfile: Annotated[Path | None, Flag(HTTP, "FILE")] = Field(
        default=None, description="serve HTTPS, with --ssl-keyfile"
    )
    ssl_keyfile: Annotated[Path | None, Flag(HTTP, "FILE")] = Field(
        default=None, description="its key"
    )
    access_log: Annotated[bool, Flag(HTTP)] = Field(
        default=False, description="a line for each request"
    )
    ping_interval: Annotated[Seconds, Flag(HTTP, "SECONDS")] = Field(
        default=15.0, description="a silent stream gets a comment so often; 0: none"
    )
    request_timeout: Annotated[Seconds, Flag(LIMITS, "SECONDS")] = Field(
        default=3600.0, description="a request's longest time, waiting included; 0: any"
    )
    drain_timeout: Annotated[Seconds, Flag(LIMITS, "SECONDS")] = Field(
        default=30.0, description="SIGTERM: how long running requests may go on"
    )
    max_prompt_tokens: Annotated[Positive | None, Flag(LIMITS, "TOKENS")] = Field(
        default=None, description="longest prompt (what the context leaves)"
    )
    max_body_bytes: Annotated[Positive, Flag(LIMITS, "BYTES")] = Field(
        default=8 * 2**20, description="of a request"
    )
    max_header_bytes: Annotated[Positive, Flag(LIMITS, "BYTES")] = Field(
        default=64 * 2**10, description="of a request"
    )

    @field_validator("served_model_name", "api_key", "allowed_origins", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("api_key", "served_model_name")
    @classmethod
    def _not_empty(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value.strip() for value in values):
            raise ValueError("must not be empty")
        return values

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model; the first is what answers call it."""
        return self.served_model_name or (self.model,)

    def engine_config(self) -> EngineConfig:
        """ValueError names the flag."""
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("--ssl-certfile and --ssl-keyfile are given together or not at all")
        for flag, file in (("certfile", self.ssl_certfile), ("keyfile", self.ssl_keyfile)):
            if file is not None and not file.is_file():
                raise ValueError(f"--ssl-{flag} {file}: there is no such file")
        if self.kv_policy is not None and self.kv_budget is None:
            raise ValueError("--kv-policy needs --kv-budget: the cells that a head keeps")
        kv = KVSpec(
            policy=None if self.kv_policy is None else policy_from_text(self.kv_policy),
            budget_tokens=self.kv_budget,
            window=self.kv_window,
        )
        spec = ModelSpec(
            self.model,
            dtype=self.dtype,
            kv=kv,
            generation_defaults=self.generation_defaults,
            weights=self.weights,
        )
        return EngineConfig(
            models={MAIN: spec},
            kv_bytes=self.kv_cache_memory_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens or max(512, 2 * self.max_num_seqs),
            threads=self.threads,
            seed=self.seed,
        )


def flag_of(name: str) -> Flag:
    """A field's place on the command line."""
    return next(m for m in Settings.model_fields[name].metadata if isinstance(m, Flag))


def settings_from(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """The file's values under those of the command line, and the key of the environment.

    ValueError names the flag, or the file's key.
    """
    values = {} if file is None else read_file(file)
    if "api_key" not in {**values, **flags} and os.environ.get(KEY_VARIABLE):
        values["api_key"] = os.environ[KEY_VARIABLE]
    try:
        return Settings.model_validate({**values, **flags})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        where = f"--{name.replace('_', '-')}" if name in flags else f"{file}: {name}"
        said = "there is no such setting" if first["type"] == "extra_forbidden" else first["msg"]
        value = "" if name == "api_key" else f" (it is {first['input']!r})"
        raise ValueError(f"{where}: {said}{value}") from error


def read_file(path: Path) -> dict[str, Any]:
    """A YAML or TOML file of settings; dashes in names are underscores."""
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ValueError(f"--config {path}: must be a .toml, .yaml or .yml file")
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {error}") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"--config {path}: must hold names and values, as in port: 8000")
    return {key.replace("-", "_"): value for key, value in values.items()}
