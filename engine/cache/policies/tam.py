"""Share the budget out among thoughts, keep what is pivotal, match attention with the rest.

TAM (arXiv 2608.12331), on Attention Matching (`engine/cache/matching.py`). With a_j the mean
attention of the reference queries on cell j of the prefix (all but the tail): cells with a_j above
`pivotal` times the mean stay verbatim; thought i, of n_i cells with mean attention w_i, gets a
share of the rest in proportion to sqrt(w_i n_i), and keeps its best cells by a_j; biases and values
of all chosen cells are fitted together, pivots left as they are.

What differs: thoughts are those that the engine counts, the prompt is one more, and they are merged
to at least `shortest` tokens. A pivot that an earlier round gave a bias keeps it, rather than 0.
The paper compacts every 1024 tokens or once, here every `window`; a thought that ends in the last
`lead` of a window brings its compaction forward, so that it falls between two thoughts. The budget
counts pivots and tail.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.cache.choose import keep_mask
from engine.cache.matching import Choice, MatchingPolicy, check_fields, mean_weight
from engine.cache.view import LayerView


@dataclass(frozen=True, kw_only=True)
class TAM(MatchingPolicy):
    """`queries` last positions' queries are the reference; see the module for the others."""

    queries: int = 64
    tail: int | None = None
    ridge: float = 1e-3
    pivotal: float = 3.0
    shortest: int = 32
    lead: float = 0.25

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.pivotal > 1:
            raise ValueError(f"pivotal must be above 1 (times the mean), not {self.pivotal}")
        if self.shortest < 1:
            raise ValueError(f"shortest must be at least 1 token, not {self.shortest}")
        if not 0 <= self.lead < 1:
            raise ValueError(f"lead must be from 0 to less than 1 window, not {self.lead}")

    def due(
        self, held: int, fresh: int, budget: int, window: int, thought_ended: bool = False
    ) -> bool:
        lead = int(self.lead * window) if thought_ended else 0
        return fresh > lead and super().due(held, fresh + lead, budget, window)

    def choose(self, view: LayerView, weights: Tensor, prefix: Tensor, budget: Tensor) -> Choice:
        attention = mean_weight(weights)  # [S, H, N]
        thought = thoughts_of(view, self.shortest)  # [S, H, N]
        one = torch.nn.functional.one_hot(thought).double() * prefix[..., None]  # [S, H, N, T]
        size = one.sum(2).long()  # [S, H, T] cells
        mass = (attention[..., None] * one).sum(2)
        # every thought that has cells keeps one beside the pivots, where the budget goes so far
        most = (budget - (size > 0).sum(-1)).clamp(min=0)
        mean = 1 / prefix.sum(-1, keepdim=True).clamp(min=1)
        pivots = keep_mask(attention, prefix & (attention > self.pivotal * mean), most)
        size = size - (pivots[..., None] * one).sum(2).long()
        shares = largest_remainder(mass.sqrt(), size, budget - pivots.sum(-1))
        rank = rank_within(attention.masked_fill(pivots | ~prefix, -1.0), thought)
        chosen = prefix & ~pivots & (rank < shares.gather(-1, thought))
        return Choice(chosen | pivots, pivots)


def thoughts_of(view: LayerView, shortest: int) -> Tensor:
    """Which thought each cell's token is of, merged to at least `shortest` tokens: [S, H, N]."""
    assert view.thoughts is not None
    rows = [merged(ends, shortest, view.end) for ends in view.thoughts.tolist()]
    width = max(map(len, rows))
    padded = [row + [view.end] * (width - len(row)) for row in rows]
    ends = torch.tensor(padded, dtype=torch.int64, device=view.pos.device)
    return (view.pos[..., None] >= ends[:, None, None]).sum(-1)


def merged(ends: list[int], shortest: int, last: int) -> list[int]:
    """The ends (ascending, -1: none) that leave thoughts of at least `shortest` tokens up to
    `last`; a shorter one joins the next, and what is left at the end the one before."""
    kept = [0]
    for end in ends:
        if end - kept[-1] >= shortest and last - end >= shortest:
            kept.append(end)
    return kept[1:]


def largest_remainder(weight: Tensor, most: Tensor, total: Tensor) -> Tensor:
    """Whole shares of `total` [...] in proportion to `weight` [..., T], at most `most` each.

    A share is its quota rounded down, but at least 1 where there is enough for all; what is over
    goes to the largest remainders, what is lacking comes from the shares furthest above theirs.
    """
    total = total.minimum(most.sum(-1)).clamp(min=0)
    weight = weight * (most > 0)
    quota = total[..., None] * weight / weight.sum(-1, keepdim=True).clamp(min=1e-300)
    shares = quota.floor().long().clamp(min=1).minimum(most)
    for _ in range(int(total.max()) + shares.shape[-1]):
        over = total - shares.sum(-1)  # [...]
        if not over.any():
            break
        up = (over > 0)[..., None]
        least = ((most > 0).sum(-1) <= total).long()[..., None]
        open_ = torch.where(up, shares < most, shares > least)
        distance = torch.where(up, quota - shares, shares - quota)
        changed = keep_mask(distance, open_, over.abs())
        shares = shares + torch.where(up, 1, -1) * changed
    return shares


def rank_within(score: Tensor, group: Tensor) -> Tensor:
    """Each cell's place in its group by score, the best first; of equals the later first."""
    best = score.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    best = score.shape[-1] - 1 - best
    order = best.gather(-1, group.gather(-1, best).sort(dim=-1, stable=True).indices)
    sorted_group = group.gather(-1, order)
    first = torch.searchsorted(sorted_group, sorted_group)
    place = torch.arange(score.shape[-1], device=score.device) - first
    return torch.empty_like(place).scatter_(-1, order, place)
