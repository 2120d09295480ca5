"""Rotary position embedding (Su et al., RoFormer, 2021) and the ways to stretch it.

Angles are float32, looked up once a step for all layers in a table that grows with the longest
sequence: a position's angles are the same whatever runs beside it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.model.architecture import DecoderConfig, RopeConfig

_CHUNK = 1024
"""Positions that the table grows by."""


class Rope:
    """One model's rotation: a frequency for each pair of dimensions, and a factor on cos and sin.

    `dynamic` (NTK-aware) raises the base with a sequence's length, from its original maximum on.
    A key keeps the rotation that it was born with, so here each position is rotated by the base of
    a sequence that ends there. That is what transformers does when it generates from a prompt
    within the original maximum; it would rotate a longer prompt by its whole length.
    """

    def __init__(self, config: DecoderConfig, device: torch.device | str) -> None:
        self._rope = config.rope
        self._original = config.rope.original_max_positions or config.max_positions
        self._exponents = _exponents(config.head_dim).to(device)  # [D / 2]
        self._frequencies = _frequencies(config).to(device)  # [D / 2]
        self._scale = _attention_factor(config.rope)
        self._table = self._angles(_CHUNK)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin at `positions` [T] (on the host), each [T, D / 2] float32."""
        cos, sin = self._table
        last = int(positions.max()) if len(positions) else 0
        if last >= len(cos):
            cos, sin = self._table = self._angles(-(-(last + 1) // _CHUNK) * _CHUNK)
        positions = positions.to(cos.device)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Of the positions below `length`."""
        place = torch.arange(length, device=self._frequencies.device).float()[:, None]  # [P, 1]
        frequencies = self._frequencies
        if self._rope.kind == "dynamic":
            frequencies = frequencies * self._slowing(place)  # [P, D / 2]
        angle = place * frequencies
        return angle.cos() * self._scale, angle.sin() * self._scale

    def _slowing(self, place: Tensor) -> Tensor:
        """What raising the base does to each frequency; exactly 1 within the original maximum."""
        length = (place + 1).clamp_min(self._original)
        stretch = self._rope.factor * (length / self._original - 1) + 1
        # the base grows by stretch ** (D / (D - 2)): the slowest pair by the whole stretch
        return torch.exp(stretch.log() * (-self._exponents / self._exponents[-1]))


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _frequencies(config: DecoderConfig) -> Tensor:
    """Radians a position, [D / 2] float32, before any dynamic scaling."""
    rope = config.rope
    original = rope.original_max_positions or config.max_positions
    plain = 1.0 / rope.theta ** _exponents(config.head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope, original)
    if rope.kind == "yarn":
        return _yarn(plain, rope, original)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig, original: int) -> Tensor:
    """Llama 3.1: slow pairs are slowed by the factor, fast ones aren't, a ramp between."""
    turns = original * plain / (2 * math.pi)  # that a pair makes over the original context
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, ramp.clamp(0, 1))


def _yarn(plain: Tensor, rope: RopeConfig, original: int) -> Tensor:
    """YaRN (Peng et al., 2023): as llama3, with the ramp over the pairs' indices."""
    pairs = plain.shape[0]

    def index(turns: float) -> float:
        """The pair, as a real number, that makes so many turns over the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    width = high - low or 0.001  # no division by zero
    ramp = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    return torch.lerp(plain, plain / rope.factor, ramp)


def _attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cos and sin with: it sharpens attention over a longer context."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return temperature(rope.mscale) / temperature(rope.mscale_all_dim)
    return temperature(1.0)
