"""Muon: momentum whose update is the nearest orthogonal matrix (Jordan et al., 2024).

https://kellerjordan.github.io/posts/muon; the quintic iteration's coefficients are those given
there. Differs: it works in bfloat16 on any device, and only on matrices; the rest is AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

STEPS = 5
QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition, [n, m]."""
    a, b, c = QUINTIC
    x = matrix.bfloat16()
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(STEPS):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    out: Tensor = wide if x.shape[0] <= x.shape[1] else wide.T
    return out.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Steps of `lr` times an orthogonal matrix, scaled for tall ones."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                mean: Tensor = state["momentum"]
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(mean, group["momentum"])  # Nesterov's
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(orthogonal(ahead), alpha=-group["lr"] * scale)
