"""Layers hold what a profile of the model says, heads what their cells' utilities ask for now.

ReasonAlloc (arXiv 2606.11164) has two levels, each made robust the same way: demands are raised to
an exponent, scaled to the total and kept within bounds.

- offline, once a model: a layer's demand is the number of cells that hold 0.93 of the attention,
  on average over heads, queries and up to 8 prompts (`taut calibrate kv-wave MODEL`);
- online, at each compaction: a head's demand is how many of the layer's best cells it has.

What differs: the scale is solved for together with the bounds, where the paper clips and scales
again (which can leave the bounds); a head is given no more cells than it holds; protected cells
count as best; and it works under any policy, while the paper's scores are R-KV's (`rkv()`). Its
budgets are means over heads, as here; its Delta = 128 is window=128.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.cache import checks
from engine.cache.allocation import Allocation
from engine.cache.choose import best_of_layer, shared
from engine.cache.view import KVShape


@dataclass(frozen=True, kw_only=True)
class ReasonAlloc(Allocation):
    """`layers` and `heads` switch its two levels; bounds are in parts of the even share.

    `profile` names the file of the layers' demands; without it, it lies beside the model.
    `per_cell` multiplies utilities by their head's number of cells before heads are compared: a
    softmax over many cells gives each less. `demand` is the profile itself, where there is no file.
    """

    layers: bool = True
    heads: bool = True
    layer_exponent: float = 0.5
    layer_least: float = 0.25
    layer_most: float = 2.0
    head_exponent: float = 0.5
    head_least: float = 0.25
    per_cell: bool = False
    profile: str | None = None
    demand: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.share(layer_least=self.layer_least, head_least=self.head_least)
        checks.at_least(1, layer_most=self.layer_most)
        checks.at_least(0, layer_exponent=self.layer_exponent, head_exponent=self.head_exponent)
        if self.demand is not None and min(self.demand, default=0) <= 0:
            raise ValueError(f"demand must be positive numbers, one a layer, not {self.demand}")

    @property
    def by_utility(self) -> bool:
        return self.heads

    def measured(self, model: Path) -> Allocation:
        if not self.layers or self.demand is not None:
            return self
        file = wave_file(model) if self.profile is None else Path(self.profile).expanduser()
        if not file.is_file():
            raise ValueError(
                f"reasonalloc needs the layers' profile, and there is no {file}: write it with"
                " `taut calibrate kv-wave MODEL`, name another with profile='FILE', or share out"
                " among heads alone with layers=False"
            )
        return replace(self, demand=read_wave(file))

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        if not self.layers:
            return [budget] * shape.layers
        if self.demand is None or len(self.demand) != shape.layers:
            has = "none" if self.demand is None else f"one of {len(self.demand)} layers"
            raise ValueError(f"reasonalloc needs a profile of {shape.layers} layers and has {has}")
        demand = torch.tensor(self.demand, dtype=torch.float64) ** self.layer_exponent
        even = torch.full_like(demand, budget)
        least, most = self.layer_least * even, self.layer_most * even
        return shared(demand, budget * shape.layers, least, most).tolist()

    def head_budgets(self, utility: Tensor, valid: Tensor, total: int) -> Tensor:
        held = valid.sum(-1)  # [S, H]
        if not self.heads:
            return torch.full_like(held, total)
        if self.per_cell:
            utility = utility * held[..., None]
        count = valid.shape[1] * total
        demand = best_of_layer(utility, valid, count).double() ** self.head_exponent
        least = held.clamp(max=self.head_least * total)
        return shared(demand, count, least, held)


def wave_file(model: Path) -> Path:
    """Where the profile of a model lies: beside its file or folder."""
    return model.with_name(f"{model.name}.kv-wave.json")


def read_wave(file: Path) -> tuple[float, ...]:
    """The layers' demands; ValueError for a file that isn't a profile."""
    try:
        demand = json.loads(file.read_text(encoding="utf-8"))["demand"]
        numbers = tuple(float(each) for each in demand)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no profile of `taut calibrate kv-wave`: {error!r}") from None
    if not numbers or not all(0 < each < float("inf") for each in numbers):
        raise ValueError(f"{file}: demands must be positive, not {demand}")
    return numbers
