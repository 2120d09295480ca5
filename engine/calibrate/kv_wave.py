"""How much each layer's attention spreads: the profile that `reasonalloc()` shares cells out by.

ReasonAlloc (arXiv 2606.11164) runs up to 8 held-out prompts forward once each. Ours are problems
with worked solutions, so that the queries are those of reasoning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import torch

from engine import build
from engine.cache.allocations.reasonalloc import wave_file
from engine.cache.wave import WaveKV
from engine.config import ModelSpec
from engine.model.checkpoint import open_checkpoint
from engine.model.decoder import StepContext
from engine.request import MAIN

COVERAGE = 0.93
"""The part of a query's attention that counts, as in the paper."""


def measure(spec: ModelSpec, prompts: Sequence[str], coverage: float = COVERAGE) -> list[float]:
    """Each layer's demand in cells, on average over prompts."""
    if not prompts or not all(isinstance(text, str) and text for text in prompts):
        raise ValueError("calibration prompts must be a list of texts, none of them empty")
    if not 0 < coverage < 1:
        raise ValueError(f"coverage must be between 0 and 1, not {coverage}")
    model = build.load_model(MAIN, spec, ("reference",))
    config = model.checkpoint.config
    total = torch.zeros(config.layers, dtype=torch.float64)
    for text in prompts:
        ids = model.tokenizer.encode(text)[: config.max_positions]
        wave = WaveKV(config.layers, coverage)
        with torch.inference_mode():
            tokens = torch.tensor(ids, device=model.device)
            model.decoder.forward(tokens, StepContext(torch.arange(len(ids)), wave))
        total += torch.tensor(wave.demand, dtype=torch.float64)
    return (total / len(prompts)).tolist()


def read_prompts(file: Path | None) -> list[str]:
    """A JSON list of texts; None: the engine's own 8."""
    if file is None:
        text = resources.files("engine.calibrate").joinpath("prompts.json").read_text("utf-8")
    else:
        text = file.read_text(encoding="utf-8")
    try:
        prompts = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} isn't JSON: {error}") from None
    if not isinstance(prompts, list):
        raise ValueError(f"{file} must be a JSON list of texts")
    return prompts


def calibrate(spec: ModelSpec, prompts: Path | None, coverage: float, out: Path | None) -> Path:
    """Measure and write the profile; where it went."""
    texts = read_prompts(prompts)
    checkpoint = open_checkpoint(spec.model)
    file = wave_file(checkpoint.path) if out is None else out
    if not os.access(file.resolve().parent, os.W_OK):
        raise ValueError(f"{file} can't be written; name another file with --out")
    write_wave(file, checkpoint.source, coverage, len(texts), measure(spec, texts, coverage))
    return file


def write_wave(
    file: Path, model: str, coverage: float, prompts: int, demand: Sequence[float]
) -> None:
    """The profile, as `reasonalloc` reads it."""
    profile = {"model": model, "coverage": coverage, "prompts": prompts, "demand": list(demand)}
    file.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
