"""min_p, top_k and top_p, in this order, each over the renormalised survivors of the last.

With tokens in order of probability (of equals, lower ids first) each of them keeps a prefix, so
one sorted pool of the likeliest tokens and three lengths are all it takes. A pool of a few hundred
nearly always holds the prefix and what decides it; only rows where it doesn't take a larger one,
in the end the whole vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.sampling.rowwise import Ranked, invert, ranked

_POOLS = (256, 4096)


class Filters(NamedTuple):
    """One value a row, [R]."""

    top_k: Tensor  # int64, V or more: off
    top_p: Tensor  # float64, 1: off
    min_p: Tensor  # float64, 0: off

    def at(self, rows: Tensor) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


class _Kept(NamedTuple):
    length: Tensor  # [R] of the prefix that is kept
    sure: Tensor  # [R] bool: a larger pool would say the same


def draw_filtered(
    probs: Tensor, filters: Filters, uniform: Tensor, pools: tuple[int, ...] = _POOLS
) -> Tensor:
    """An id for each row of `probs` [R, V], by inverting its cumulated prefix, likeliest first."""
    vocab = probs.shape[1]
    pool = ranked(probs, pools[0] if pools else vocab)
    cumulated = pool.values.double().cumsum(-1)  # [R, C]
    kept = _keep(pool, cumulated, filters, vocab)
    total = cumulated.gather(1, kept.length[:, None] - 1).squeeze(1)
    index = invert(cumulated, total, uniform * total)
    ids = pool.ids.gather(1, index[:, None]).squeeze(1)
    if pool.ids.shape[1] < vocab and not bool(kept.sure.all()):
        rest = (~kept.sure).nonzero().squeeze(1)
        ids[rest] = draw_filtered(probs[rest], filters.at(rest), uniform[rest], pools[1:])
    return ids


def _keep(pool: Ranked, cumulated: Tensor, filters: Filters, vocab: int) -> _Kept:
    probs = pool.values.double()  # [R, C] descending
    likely = (probs >= filters.min_p[:, None] * probs[:, :1]).sum(-1)
    bounded = torch.minimum(likely, filters.top_k).clamp_(min=1)
    # without min_p and top_k the mass that top_p is a part of lies beyond the pool, and is 1
    free = (filters.top_k >= vocab) & (filters.min_p <= 0.0)
    mass = torch.where(free, 1.0, cumulated.gather(1, bounded[:, None] - 1).squeeze(1))
    nucleus = ((cumulated - probs) < (filters.top_p * mass)[:, None]).sum(-1)
    length = torch.minimum(bounded, nucleus).clamp_(min=1)
    decisive = torch.where(free, length, bounded)
    last = probs.gather(1, decisive[:, None] - 1).squeeze(1)
    # what isn't in the pool is at most as likely as the pool's last
    sure = (last > probs[:, -1]) | (probs[:, -1] <= 0.0)
    return _Kept(length, sure)
