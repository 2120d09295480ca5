"""Weights in their number formats, behind one protocol: the decoder only ever calls `matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from engine.kernels.dispatch import select
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


class Dense:
    """A weight in float32 or bfloat16, stored as the chosen linear backend likes."""

    in_group = 1

    def __init__(self, weight: Tensor, bias: Tensor | None, prefer: Sequence[str] = ()) -> None:
        """`weight` [out, in] and `bias` [out] on the device and in the dtype they are to run in."""
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._prefer = prefer
        self._bias = bias
        spec = LinearSpec(weight.device.type, weight.dtype)
        self._linear: Linear = select(LINEAR, spec, prefer).build(weight, bias)

    def matmul(self, x: Tensor) -> Tensor:
        return self._linear(x)

    def take_out(self, rows: Tensor) -> Dense:
        bias = None if self._bias is None else self._bias[rows]
        return Dense(self._linear.plain()[rows], bias, self._prefer)

    def take_in(self, cols: Tensor) -> Dense:
        return Dense(self._linear.plain()[:, cols], self._bias, self._prefer)
