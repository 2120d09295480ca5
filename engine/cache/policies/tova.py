"""Keep the tokens that the last query looks at, the same in all heads.

TOVA (Oren et al. 2024, arXiv 2401.06104): the last token's attention, averaged over all heads of
the layer; the lowest token goes from every head. What differs: `window` tokens go at once, sinks
are protected (sinks=0: not), and where heads hold different cells (another policy's choice, or
unequal budgets) a token's mean counts heads that lost it as not looking. The paper's budget is
budget_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.policy import ScorePolicy
from engine.cache.scores import older, window_attention
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class TOVA(ScorePolicy):
    """The last token stays, or `recent` last ones."""

    sinks: int | None = None
    recent: int | None = None

    queries = 1

    @property
    def usual_recent(self) -> int:
        return 1

    def score(self, view: LayerView, budget: int) -> Tensor:
        own = window_attention(view, older(view, 0), "softmax")
        return mean_over_heads(own, view.pos, view.valid)


def mean_over_heads(scores: Tensor, pos: Tensor, valid: Tensor) -> Tensor:
    """Each cell takes the mean over all heads of its token's score, 0 where a head lost it.

    scores, pos (ascending where valid), valid [S, H, N] -> [S, H, N]
    """
    heads, cells = pos.shape[1:]
    ascending = pos.masked_fill(~valid, torch.iinfo(pos.dtype).max)
    theirs = ascending[:, None].expand(-1, heads, -1, -1).contiguous()  # [S, H, H', N]
    mine = pos[:, :, None].expand(-1, -1, heads, -1).contiguous()
    at = torch.searchsorted(theirs, mine).clamp(max=cells - 1)
    there = theirs.gather(-1, at) == mine
    values = scores[:, None].expand(-1, heads, -1, -1).gather(-1, at)
    return (values * there).sum(2) / heads
