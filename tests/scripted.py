"""A model that says what it is told, for whole-engine tests of exact texts.

It takes the place of an executor's decoder: the scheduler, the cache and the sampler stay real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.build import RoleCache, shape_of, slots_of
from engine.config import EngineConfig, ModelSpec, ReasoningSpec
from engine.engine import Engine
from engine.model.architecture import DecoderConfig
from engine.model.decoder import StepContext
from engine.model.tokenizer import Tokenizer
from engine.request import MAIN
from engine.scheduler.controller import Controller
from tests.tiny import tiny_config, tiny_tensors, write_folder

Script = Callable[[int], int]
"""The position of a token -> the token after it."""


class ScriptedDecoder:
    """Stands in for `Decoder`: greedy sampling gives script(position)."""

    def __init__(self, config: DecoderConfig, script: Script) -> None:
        self.config = config
        self.script = script
        self.runs = 0

    def forward(self, ids: Tensor, ctx: StepContext) -> Tensor:
        self.runs += 1
        cfg = self.config
        q = torch.zeros(len(ids), cfg.q_heads, cfg.head_dim)
        kv = torch.zeros(len(ids), cfg.kv_heads, cfg.head_dim)
        for layer in range(cfg.layers):
            ctx.kv.attend(layer, q, kv, kv)
        return ctx.positions[:, None].double()  # [T, 1]

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), self.config.vocab_size)
        said = [self.script(int(position)) for position in hidden[:, 0]]
        out[torch.arange(len(said)), said] = 50.0
        return out


def tiny_folder(path: Path, *, seed: int = 0) -> str:
    config = tiny_config()
    return str(write_folder(path, config, tiny_tensors(config, seed)))


def tiny_spec(
    folder: str,
    *,
    reasoning: ReasoningSpec | None = None,
    controllers: tuple[Controller, ...] = (),
    helper: str | None = None,
    tokens: int = 4096,
    max_num_seqs: int = 16,
) -> EngineConfig:
    """One or two tiny models; `tokens` fit into the cache of each, side state apart."""
    models = {MAIN: ModelSpec(folder, reasoning=reasoning, generation_defaults=False)}
    if helper is not None:
        models["helper"] = ModelSpec(helper, generation_defaults=False)
    config = EngineConfig(
        models=models,
        controllers=controllers,
        kv_bytes=1,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=64,
        threads=1,
    )
    shape, spec = shape_of(tiny_config()), models[MAIN].kv
    caches = [RoleCache(shape, spec, torch.float32, slots_of(config, role)) for role in models]
    per_role = [int(tokens * c.token_bytes) + c.side_bytes(512) for c in caches]
    return replace(config, kv_bytes=sum(per_role))


def script_engine(engine: Engine, script: Script) -> ScriptedDecoder:
    """From now on, `engine`'s main model says what `script` does."""
    executor = engine._executors[MAIN]
    decoder = ScriptedDecoder(executor.decoder.config, script)
    executor.decoder = decoder  # type: ignore[assignment]
    return decoder


def saying(prompt: int, tokens: Iterable[int], after: int) -> Script:
    """These tokens behind a prompt of so many, then `after` for ever."""
    told = list(tokens)

    def script(position: int) -> int:
        at = position + 1 - prompt
        return told[at] if 0 <= at < len(told) else after

    return script


def letters(tokenizer: Tokenizer, text: str | bytes) -> list[int]:
    """One token a byte."""
    ids = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    data = text.encode() if isinstance(text, str) else text
    return [ids[bytes((byte,))] for byte in data]
