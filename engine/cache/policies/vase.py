"""Keep cells whose values range widely, and draw the rest by chance.

VaSE (arXiv 2606.03928): evicting the few values of abnormal range makes a model loop, and chance in
what stays keeps its chains diverse. Two variants:

- attnv: of a head's budget, its last `recent` cells and the `large` share with the widest values
  (max - min over dimensions; sinks count as widest) stay; the rest are drawn without replacement in
  proportion to what as many last queries attend to, smoothed over neighbours;
- dkv: the cells of the largest |k G|^2 |v G|^2 stay, with a Gaussian G [D, rank] that is drawn
  afresh at every compaction; with `fresh=False` it's the same at all of them, as in CurDKV.

Drawing without replacement is taking the largest of log p + Gumbel noise, which is keyed by (seed,
lineage, layer, kv head, position of the compaction, position of the cell). What differs: the prompt
is compacted at its end where the paper waits for the first generated tokens, each kv head has its
own G, and a small budget shrinks `recent` (and with it the queries) to its half. The paper's label
T_b with its buffer R is budget_tokens=T_b, window=R: T_b counts the R recent cells, as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.cache import checks
from engine.cache.choose import keep_best, keep_mask
from engine.cache.noise import normal, uniform
from engine.cache.policy import ScorePolicy
from engine.cache.scores import mean_pool, older, window_attention
from engine.cache.view import Compaction, LayerView


@dataclass(frozen=True, kw_only=True)
class VaSE(ScorePolicy):
    """See the module. `large` and `kernel` are attnv's, `rank` and `fresh` dkv's."""

    variant: Literal["attnv", "dkv"] = "attnv"
    large: float = 0.25
    kernel: int = 5
    rank: int = 20
    fresh: bool = True
    sinks: int | None = None
    recent: int | None = None

    cells_at_once = 2**13

    def __post_init__(self) -> None:
        checks.one_of(("attnv", "dkv"), variant=self.variant)
        checks.share(large=self.large)
        checks.kernel(self.kernel)
        checks.at_least(1, rank=self.rank)

    @property
    def usual_recent(self) -> int:
        return 64

    def remembers(self, budget: int, window: int) -> int:
        return self.sizes(budget)[1] if self.variant == "attnv" else 0

    def score(self, view: LayerView, budget: int) -> Tensor:
        if self.variant == "dkv":
            return self._leverage(view)
        recent = self.sizes(budget)[1]
        return mean_pool(window_attention(view, older(view, recent), "softmax"), self.kernel)

    def _leverage(self, view: LayerView) -> Tensor:
        """Each cell's share of its head's products |k G|^2 |v G|^2, [S, H, N]."""
        assert view.key is not None
        keyed = view if self.fresh else view._replace(key=torch.zeros_like(view.key))
        dim = view.k.shape[-1]
        drawn = normal(keyed, dim * self.rank).float() * self.rank**-0.5
        project = drawn.view(*drawn.shape[:2], dim, self.rank)  # [S, H, D, r]
        k, v = (((x.float() @ project) ** 2).sum(-1) for x in (view.k, view.v))
        product = k * v * view.valid
        return product / product.sum(-1, keepdim=True).clamp(min=torch.finfo(product.dtype).tiny)

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        if self.variant == "dkv":
            return super().compact(view, utility, budget)
        sinks, recent = self._protected(budget)
        candidates = older(view, recent)
        spread = (view.v.amax(-1) - view.v.amin(-1)).float()  # [S, H, N]
        spread = spread.masked_fill(view.pos < sinks[..., None], torch.inf)
        wide = keep_mask(spread, candidates, self._wide(budget, sinks, recent))
        weight = utility.double().clamp(min=torch.finfo(torch.float64).tiny).log()
        drawn = weight - (-uniform(view).log()).log()  # Gumbel noise
        drawn = drawn.masked_fill(wide | (view.valid & ~candidates), torch.inf)
        return Compaction(keep_best(drawn, view.valid, budget))

    def _wide(self, budget: Tensor, sinks: Tensor, recent: Tensor) -> Tensor:
        """How many stay for their values, [S, H]: the sinks at least, at most what has room."""
        return (budget * self.large).long().maximum(sinks).minimum(budget - recent)

    def refuses(self, budget: int, window: int) -> str | None:
        recent = self.sizes(budget)[1]
        if self.variant == "attnv" and recent + int(budget * self.large) >= budget:
            return (
                f"{recent} recent cells and {int(budget * self.large)} wide ones leave nothing of"
                f" a budget of {budget} to draw; make recent or large smaller"
            )
        return super().refuses(budget, window)
