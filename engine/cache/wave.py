"""How many cells each layer's attention needs: what a profile of a model is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.cache.scores import attention
from engine.kernels.layers import StepCells


class WaveKV:
    """A step's cache for one whole prompt that attends to all of it, and counts.

    `demand` [layers]: the fewest cells that hold `coverage` of a query's attention, on average over
    query heads and queries (ReasonAlloc, arXiv 2606.11164). Memory is a layer's whole matrix of
    attention, [Hq, T, T] float32.
    """

    def __init__(self, layers: int, coverage: float) -> None:
        self.demand = [0.0] * layers
        self._coverage = coverage

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, Hq, D], k and v [T, H, D] -> [T, Hq, D], causal."""
        tokens, group = q.shape[0], q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        logits = q.float().transpose(0, 1) @ keys.mT * q.shape[-1] ** -0.5  # [Hq, T, T]
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
        weights = attention(logits, seen)
        self.demand[layer] = float(cells_for(weights, self._coverage).double().mean())
        return (weights @ values).transpose(0, 1).to(q.dtype)

    def cells(self) -> StepCells:
        raise NotImplementedError("a profile is measured layer by layer")


def cells_for(weights: Tensor, coverage: float) -> Tensor:
    """The fewest cells whose weights sum to at least `coverage`: [..., N] -> [...] int64."""
    mass = weights.sort(dim=-1, descending=True).values.cumsum(-1)
    return (mass < coverage).sum(-1).clamp(max=weights.shape[-1] - 1) + 1
