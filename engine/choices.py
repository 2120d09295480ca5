"""Which backend runs each op, and why not the others: for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine import build
from engine.config import ModelSpec
from engine.kernels.attention import ATTENTION, AttentionSpec
from engine.kernels.dispatch import Op
from engine.kernels.formats import format_of
from engine.kernels.linear import LINEAR, LinearSpec
from engine.model.checkpoint import Checkpoint
from engine.model.quantize import ACTIVATIONS, WEIGHT_FORMATS


def backend_rows(spec: ModelSpec, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """An op's name, and what was chosen for it."""
    device = build.device_of(spec.device)
    dtype = build.dtype_of(spec.dtype, torch.device(device))
    c = checkpoint.config
    attention = AttentionSpec(c.head_dim, c.q_heads // c.kv_heads, device, dtype, dtype)
    yield "attention", _choice(ATTENTION, attention)
    weights = WEIGHT_FORMATS[spec.weights]
    for what, store in (("linear", weights.layers), ("LM head", weights.head)):
        made = format_of(store(torch.zeros(1, 16), None, dtype), dtype)
        stored = checkpoint.stored_format if what == "linear" else None
        held = LinearSpec(
            device, dtype, stored or made, activation_bits=ACTIVATIONS[spec.activations]
        )
        yield what, _choice(LINEAR, held)


def _choice(op: Op[Any], spec: object) -> str:
    chosen = False
    words = []
    for backend, reason in op.reasons(spec):
        if reason is not None:
            words.append(f"{backend} refused ({reason})")
        else:
            words.append(f"{backend} {'available' if chosen else 'chosen'}")
            chosen = True
    return ", ".join(words)
