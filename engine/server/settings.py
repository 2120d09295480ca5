"""Everything `taut serve` can be told, once: flags, the same names in a YAML or TOML file.

Those of the model are `ModelOptions`, which all commands share. Names are vLLM's where the meaning
is the same. What the command line says wins over the file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, field_validator
from pydantic.dataclasses import dataclass

from engine.cache.policy import KVSpec
from engine.config import EngineConfig
from engine.options import CACHE, LOAD, MODEL, ModelOptions, Words
from engine.scheduler.controllers.loop_guard import LoopGuard
from engine.server.thinking import parse_efforts

KEY_VARIABLE = "TAUT_API_KEY"

REASONING, HTTP, LIMITS = "reasoning", "HTTP", "limits"

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings(ModelOptions):
    """A server's whole configuration."""

    served_model_name: Annotated[
        tuple[str, ...], Words("the name that clients ask for; repeatable (MODEL)", MODEL, "NAME")
    ] = ()
    loop_guard: Annotated[
        bool, Words("close thinking that repeats itself word for word", REASONING)
    ] = True
    reasoning_efforts: Annotated[
        str,
        Words(
            "budgets of efforts that differ: low=512,high=none (minimal=128, low=1024, "
            "medium=4096, high=16384, xhigh=none)",
            REASONING,
            "TABLE",
        ),
    ] = ""
    kv_allow_full: Annotated[bool, Words("a request may ask for the full cache", CACHE)] = False
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Words("memory of all caches (half of what the weights leave)", CACHE, "BYTES"),
    ] = None
    max_num_seqs: Annotated[Positive, Words("sequences that run at once", LOAD, "N")] = 64
    max_num_batched_tokens: Annotated[
        Positive | None, Words("tokens of one step (512, or twice --max-num-seqs)", LOAD, "TOKENS")
    ] = None
    max_queued: Annotated[
        Count, Words("sequences that may wait; more are answered 429", LOAD, "N")
    ] = 256
    seed: Annotated[int | None, Words("makes requests without a seed reproducible", LOAD, "N")] = (
        None
    )
    host: Annotated[str, Words("0.0.0.0 takes requests from other machines", HTTP)] = "127.0.0.1"
    port: Annotated[Port, Words("0: any free one", HTTP)] = 8000
    api_key: Annotated[
        tuple[str, ...],
        Words(f"clients must send it; repeatable; also ${KEY_VARIABLE} (none)", HTTP, "KEY"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Words("web pages that may call, CORS; repeatable, * for all (none)", HTTP, "URL"),
    ] = ()
    ssl_certfile: Annotated[Path | None, Words("serve HTTPS, with --ssl-keyfile", HTTP, "FILE")] = (
        None
    )
    ssl_keyfile: Annotated[Path | None, Words("its key", HTTP, "FILE")] = None
    access_log: Annotated[bool, Words("a line for each request", HTTP)] = False
    ping_interval: Annotated[
        Seconds, Words("a silent stream gets a comment so often; 0: none", HTTP, "SECONDS")
    ] = 15.0
    request_timeout: Annotated[
        Seconds, Words("a request's longest time, waiting included; 0: any", LIMITS, "SECONDS")
    ] = 3600.0
    drain_timeout: Annotated[
        Seconds, Words("SIGTERM: how long running requests may go on", LIMITS, "SECONDS")
    ] = 30.0
    max_prompt_tokens: Annotated[
        Positive | None, Words("longest prompt (what the context leaves)", LIMITS, "TOKENS")
    ] = None
    max_body_bytes: Annotated[Positive, Words("of a request", LIMITS, "BYTES")] = 8 * 2**20
    max_header_bytes: Annotated[Positive, Words("of a request", LIMITS, "BYTES")] = 64 * 2**10

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

    @field_validator("reasoning_efforts")
    @classmethod
    def _a_table(cls, value: str) -> str:
        parse_efforts(value)
        return value

    @property
    def efforts(self) -> Mapping[str, int | None]:
        """Tokens of thinking by the effort's name; None: no budget."""
        return parse_efforts(self.reasoning_efforts)

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
        return self.config(
            controllers=(LoopGuard(),) if self.loop_guard else (),
            kv_bytes=self.kv_cache_memory_bytes,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens or max(512, 2 * self.max_num_seqs),
            seed=self.seed,
        )

    def kv(self) -> KVSpec:
        return replace(super().kv(), allow_full=self.kv_allow_full)


def settings_from(flags: Mapping[str, Any], file: Path | None = None) -> Settings:
    """The file's values under those of the command line, and the key of the environment.

    ValueError names the flag, or the file's key.
    """
    values = {} if file is None else read_file(file)
    if "api_key" not in {**values, **flags} and os.environ.get(KEY_VARIABLE):
        values["api_key"] = os.environ[KEY_VARIABLE]
    try:
        return Settings(**{**values, **flags})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        where = f"--{name.replace('_', '-')}" if name in flags else f"{file}: {name}"
        said = (
            "there is no such setting"
            if first["type"] == "unexpected_keyword_argument"
            else first["msg"]
        )
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
