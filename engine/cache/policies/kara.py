"""Compact each window of generated cells once, by what its own tokens look at, in runs.

Kara (arXiv 2607.01237): when a window of new cells is complete, they are scored by attention among
themselves, forwards and backwards; a part is kept for good, some of it grown from the best cells
into runs (Token2Chunk); then the next window begins. Older cells are never touched, so a compaction
costs the same however long the chain is. The paper gives the parts; the formulas and numbers here
are ours (its text leaves them open):

- a cell's score is the mean, over the window's queries and the group's query heads, of the softmax
  over the window's cells, without a causal mask;
- of `budget` cells all but the `grown` share are seeds, the best; from each, the best first, a run
  grows to its better neighbour until it has `chunk` cells or the neighbour is below the median;
  grown cells are kept in that order, then the best of the rest.

The budget is of each window, the retention ratio budget / window; the prompt is kept, and the
newest `recent` cells wait for the next window: prompt + generated * ratio cells a head, and a
window. So memory grows, and running out preempts and computes again. Every query of a window is
remembered (the paper computes them again): side state of window + recent rows a query head and
layer. Survivors move up behind the last window's and the pages that fall empty are freed, as KvLLM
does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cache import checks
from engine.cache.choose import keep_best, ranks
from engine.cache.policy import KVPolicy
from engine.cache.scores import window_attention
from engine.cache.view import Compaction, LayerView


@dataclass(frozen=True, kw_only=True)
class Kara(KVPolicy):
    """See the module; `bidirectional=False` and `grown=0.0` each take one of its two parts away."""

    recent: int = 32
    chunk: int = 8
    grown: float = 0.5
    bidirectional: bool = True

    keeps_prompt = True
    bounded = False

    def __post_init__(self) -> None:
        checks.at_least(0, recent=self.recent)
        checks.at_least(1, chunk=self.chunk)
        checks.share(grown=self.grown)

    def remembers(self, budget: int, window: int) -> int:
        return window + self.recent

    def refuses(self, budget: int, window: int) -> str | None:
        if budget < window:
            return None
        return f"a budget of {budget} cells of each window of {window} keeps all; make it smaller"

    def peak(self, prompt: int, total: int, budget: int, window: int) -> int:
        done = max(total - prompt - self.recent, 0) // window
        return min(total, prompt + done * min(budget, window) + window + self.recent)

    def due(
        self, held: int, fresh: int, budget: int, window: int, thought_ended: bool = False
    ) -> bool:
        return fresh >= window + (0 if held else self.recent)

    def span(self, prompt: int, last: int, now: int) -> tuple[int, int]:
        return max(prompt, last - self.recent), now - self.recent

    def utility(self, view: LayerView, budget: int) -> Tensor:
        assert view.query_pos is not None
        within = (view.query_pos >= view.start) & (view.query_pos < view.end)  # [S, W]
        view = view._replace(query_pos=view.query_pos.masked_fill(~within, -1))
        return window_attention(view, view.valid, "softmax", causal=not self.bidirectional)

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        seeds = budget - (self.grown * budget).long()
        order = in_runs(utility, view.valid, seeds, self.chunk)
        return Compaction(keep_best(-order.double(), view.valid, budget))


def in_runs(scores: Tensor, valid: Tensor, seeds: Tensor, chunk: int) -> Tensor:
    """The order in which cells are kept: seeds, then what grows from them, then the best others.

    scores, valid [S, H, N], seeds [S, H] -> [S, H, N] int64, the smallest first
    """
    cells = scores.shape[-1]
    rank = ranks(scores, valid)
    index = torch.arange(cells, device=scores.device).expand_as(rank)
    seed = valid & (rank < seeds[..., None])
    known = scores.masked_fill(~valid, torch.nan)
    median = known.nanmedian(-1, keepdim=True).values
    walls = F.pad(scores.masked_fill(~valid, -torch.inf), (1, 1), value=-torch.inf)
    order = rank + cells * chunk  # those that nothing grows to
    left, right, growing = index, index, seed
    for step in range(chunk - 1):
        before, after = walls.gather(-1, left), walls.gather(-1, right + 2)
        growing = growing & (before.maximum(after) >= median)
        to_left = before > after
        at = torch.where(to_left, left - 1, right + 1).clamp(0, cells - 1)
        turn = torch.where(growing, rank * chunk + step, torch.iinfo(torch.int64).max)
        order = order.scatter_reduce(-1, at, turn, "amin")
        left = torch.where(growing & to_left, left - 1, left)
        right = torch.where(growing & ~to_left, right + 1, right)
    return torch.where(seed, rank - cells, order)
