"""Views of random cells for policies that are asked without a cache."""

import torch
from torch import Tensor

from engine.cache.policy import KVPolicy
from engine.cache.view import LayerView

GROUP = 2


def make_view(
    queries: int, counts: list[list[int]], gaps: bool = True, seed: int = 0, bias: bool = False
) -> LayerView:
    """A view of slots whose heads hold `counts` [S][H] cells, and of `queries` later queries."""
    noise = torch.Generator().manual_seed(seed)
    length = torch.tensor(counts)
    slots, heads, cells = *length.shape, int(length.max())
    steps = torch.randint(1, 4 if gaps else 2, (slots, heads, cells), generator=noise)
    steps[..., 0] = 0
    rows = pos = None
    if queries:
        rows = torch.randn((slots, queries, heads * GROUP, 8), generator=noise)
        pos = torch.arange(queries).expand(slots, -1) + 1000
    k, v = (torch.randn(slots, heads, cells, 8, generator=noise) for _ in range(2))
    at = steps.cumsum(-1)
    ends = torch.arange(10, max(int(at.max()), 11), 7)
    return LayerView(
        layer=torch.ones(slots, dtype=torch.int64),
        start=0,
        end=int(at.max()) + 1,
        k=k,
        v=v,
        pos=at,
        valid=torch.arange(cells) < length[..., None],
        queries=rows,
        query_pos=pos,
        bias=torch.rand(slots, heads, cells, generator=noise) if bias else None,
        thoughts=ends.expand(slots, -1),
        key=torch.arange(slots) + 2**62 + 1000 * seed,
    )


def run(policy: KVPolicy, view: LayerView, budget: Tensor, total: int) -> Tensor:
    return policy.compact(view, policy.utility(view, total), budget).keep
