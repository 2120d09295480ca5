"""Weights in their number formats, behind one protocol: the decoder only ever calls `matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.kernels.dispatch import select
from engine.kernels.formats import Parts, format_of, nbytes
from engine.kernels.linear import LINEAR, Linear, LinearSpec


class Weight(Protocol):
    """W [out, in] in some number format.

    `in_group` is how many neighbouring columns share a scale: columns are taken by whole groups.
    """

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def in_group(self) -> int: ...

    def matmul(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], the bias added if there is one."""

    def take_out(self, rows: Tensor) -> Self:
        """The weight of some outputs, in that order."""

    def take_in(self, cols: Tensor) -> Self:
        """The weight of some inputs, in that order, with the whole bias."""


class Stored:
    """A weight in any of the formats, laid out as the chosen linear backend likes.

    Its parts decide the format; `linear` is what the backend made of them.
    """

    def __init__(
        self,
        parts: Parts,
        dtype: torch.dtype,
        prefer: Sequence[str] = (),
        *,
        gated: bool = False,
        activation_bits: int = 0,
    ) -> None:
        """`parts` on the device that they are to run on; `dtype` is that of activations, which are
        rounded first where `activation_bits` says so (see `LinearSpec`). `gated`: gates, then what
        they gate; an output is a pair of them (see `linear.swiglu`)."""
        self.out_features, self.in_features = parts.shape
        self.out_features //= 1 + gated
        self.nbytes = nbytes(parts)
        self.in_group = parts.in_group
        self._dtype = dtype
        self._prefer = prefer
        self._gated = gated
        self._bits = activation_bits
        kind = format_of(parts, dtype)
        spec = LinearSpec(parts[0].device.type, dtype, kind, gated, activation_bits)
        self.linear: Linear = select(LINEAR, spec, prefer).build(spec, parts)

    def matmul(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def take_out(self, rows: Tensor) -> Stored:
        if self._gated:
            rows = torch.cat((rows, rows + self.out_features))
        return self._like(self.linear.parts().take_out(rows))

    def take_in(self, cols: Tensor) -> Stored:
        return self._like(self.linear.parts().take_in(cols))

    def _like(self, parts: Parts) -> Stored:
        return Stored(
            parts, self._dtype, self._prefer, gated=self._gated, activation_bits=self._bits
        )
