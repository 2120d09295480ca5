"""The seams of lossy caching: KVSpec (what is configured), KVPolicy (when and how to compact),
ScorePolicy (which cells stay). How many cells each head holds is `allocation.py`'s.

A policy is a frozen value whose fields are its paper's hyperparameters. It never sees a page, and
keeps no state: what belongs to a sequence is in the view.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeGuard

import torch
from torch import Tensor

from engine.cache.allocation import Allocation
from engine.cache.allocations.uniform import Uniform
from engine.cache.breadth import CALIBRATED, chosen_cells
from engine.cache.choose import keep_best
from engine.cache.format import FLOATS, FORMATS, KVFormat, format_of
from engine.cache.view import Compaction, KVShape, LayerView

MIN_BUDGET = 4
"""Fewer cells a head make no cache."""


class KVPolicy(ABC):
    """WHEN a slot is compacted and HOW.

    What the hot path must supply: `queries`, how many last post-RoPE queries the view needs, and
    `bias`, whether cells carry one. What becomes of the prompt: it is compacted while it is read
    (`streams_prompt`), or never on offer nor counted, as budgets are of what is generated
    (`keeps_prompt`), or cached whole, and the policy is first asked at its last token. `bounded` is
    false where the peak grows with the output: then admission promises the need of the tokens so
    far, and running out preempts.

    `by_utility`: whether `compact` reads utilities; where the allocation doesn't either, they are
    zeros. `cells_at_once`: how many cells of all heads a view holds at most, unless one layer has
    more. The more a policy does with each, the fewer: a view is compacted in one go, and other
    streams wait for it.
    """

    queries: int = 0
    bias: bool = False
    streams_prompt: bool = False
    keeps_prompt: bool = False
    bounded: bool = True
    by_utility: bool = True
    cells_at_once: int = 2**14

    def remembers(self, budget: int, window: int) -> int:
        """How many last post-RoPE queries the view needs."""
        return self.queries

    def peak(self, prompt: int, total: int, budget: int, window: int) -> int:
        """Cells a head needs at most, for a prompt and a total length; admission reserves them."""
        bounded = budget + window
        if self.keeps_prompt:
            return min(total, prompt + bounded)
        return min(total, bounded if self.streams_prompt else max(prompt, bounded))

    def due(
        self, held: int, fresh: int, budget: int, window: int, thought_ended: bool = False
    ) -> bool:
        """Whether to compact now. Asked of each layer and after every cell; one that is due is due
        for all.

        `budget` is the layer's, `held` the cells that its heads held after the last compaction (on
        average), `fresh` the cells appended since. Monotone in `fresh`, and due at a thought's end
        wherever it would be elsewhere.
        """
        return fresh > 0 and held + fresh >= budget + window

    def span(self, prompt: int, last: int, now: int) -> tuple[int, int]:
        """Positions [start, end) whose cells are on offer, for a prompt of so many tokens, the last
        compaction after `last` tokens (0: none yet) and this one after `now`."""
        return prompt if self.keeps_prompt else 0, now

    @abstractmethod
    def utility(self, view: LayerView, budget: int) -> Tensor:
        """What each cell is worth, [S, H, N] float32; computed once, for allocation and policy."""

    def protected(self, view: LayerView, budget: Tensor) -> Tensor:
        """Cells that stay whatever they're worth where heads have such budgets [S, H]: [S, H, N]
        bool."""
        return torch.zeros_like(view.valid)

    @abstractmethod
    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        """Which cells stay; `budget` [S, H] cells a head."""

    def refuses(self, budget: int, window: int) -> str | None:
        """Why the policy can't keep to a budget; None if it can."""
        return None


class ScorePolicy(KVPolicy):
    """The common case: protect sinks and recent cells, keep the best-scored of the rest.

    Sinks are the tokens at positions below `sinks`, recent are a head's last `recent` cells. A size
    left None is the method's own (`usual_*`) for a large budget, and shrinks with a small one, to
    an eighth for sinks and a half for recent. Sizes given are kept to, and refused if they don't
    fit; only a head whose own share of the budget is smaller still gives way, recent cells first.
    """

    sinks: int | None = None
    recent: int | None = None
    usual_sinks: int = 4

    @property
    def usual_recent(self) -> int:
        return 0

    @abstractmethod
    def score(self, view: LayerView, budget: int) -> Tensor:
        """[S, H, N] float32, finite, higher stays."""

    def utility(self, view: LayerView, budget: int) -> Tensor:
        return self.score(view, budget)

    def protected(self, view: LayerView, budget: Tensor) -> Tensor:
        sinks, recent = self._protected(budget)
        last = (view.valid.sum(-1) - recent)[..., None]  # [S, H, 1] index of the first recent cell
        index = torch.arange(view.valid.shape[-1], device=view.valid.device)
        return view.valid & ((index >= last) | (view.pos < sinks[..., None]))

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        utility = utility.masked_fill(self.protected(view, budget), torch.inf)
        return Compaction(keep_best(utility, view.valid, budget))

    def sizes(self, budget: int) -> tuple[int, int]:
        """Sinks and recent cells at a budget."""
        sinks, recent = self.sinks, self.recent
        if sinks is None:
            sinks = min(self.usual_sinks, budget // 8)
        return sinks, min(self.usual_recent, budget // 2) if recent is None else recent

    def _protected(self, budget: Tensor) -> tuple[Tensor, Tensor]:
        """Sinks and recent cells of heads with such budgets, each of budget's shape."""
        if self.sinks is None:
            sinks = (budget // 8).clamp(max=self.usual_sinks)
        else:
            sinks = budget.clamp(max=self.sinks)
        if self.recent is None:
            return sinks, (budget // 2).clamp(max=self.usual_recent)
        return sinks, (budget - sinks).clamp(max=self.recent)

    def refuses(self, budget: int, window: int) -> str | None:
        for name in ("sinks", "recent"):
            size = getattr(self, name)
            if size is not None and size < 0:
                return f"{name} must be at least 0, not {size}"
        sinks, recent = self.sizes(budget)
        if sinks + recent >= budget:
            return (
                f"{sinks} sinks and {recent} recent cells leave nothing of a budget of {budget}"
                " to choose; make them smaller or leave them to their defaults, which shrink"
            )
        return None


FULL = 2**30
"""The budget of a slot that is never compacted."""


def _integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """How a model's cache stores and bounds its cells.

    `policy` None is the full cache. `budget_tokens` cells a head stay after a compaction, on
    average, everything counted; `window` more may be appended before the next one. A request may
    ask for a smaller budget (`SamplingParams.kv_budget`), and with `allow_full` for the full cache.
    `format` "auto" stores cells in the model's dtype. int8, int4 and int2 pack them in groups of 64
    but for the last `tail_tokens` of each head and up to two groups more, which are in
    `tail_format`; all of them count as cells of the budget. `budget_bytes` says instead of
    `budget_tokens` what all layers and heads of a sequence hold after a compaction, codes, grids,
    positions, biases and the tail counted: fewer bits are more cells. How many bits are best at
    such a budget `taut calibrate kv-bits` measures: "calibrated" is what it chose, tail and all.
    """

    format: Literal["auto", "fp32", "bf16", "int8", "int4", "int2", "calibrated"] = "auto"
    tail_tokens: int = 64
    tail_format: Literal["auto", "fp32", "bf16"] = "auto"
    policy: KVPolicy | None = None
    allocation: Allocation = field(default_factory=Uniform)
    budget_tokens: int | None = None
    budget_bytes: int | None = None
    window: int = 128
    allow_full: bool = False

    def __post_init__(self) -> None:
        self._check_format()
        if self.policy is not None and not isinstance(self.policy, KVPolicy):
            raise ValueError(f"policy must be a KVPolicy such as SnapKV(), not {self.policy!r}")
        if not isinstance(self.allocation, Allocation):
            raise ValueError(f"allocation must be an Allocation, not {self.allocation!r}")
        if not isinstance(self.allow_full, bool):
            raise ValueError(f"allow_full must be True or False, not {self.allow_full!r}")
        if self.policy is None:
            if self.allocation != Uniform():
                raise ValueError(f"allocation {self.allocation} needs a policy that evicts cells")
            for name in ("budget_tokens", "budget_bytes"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name}={value} needs a policy that keeps to it; "
                        f"give one, or leave {name} out for the full cache"
                    )
        else:
            self._check(self.policy)

    def _check_format(self) -> None:
        known = (*FORMATS, CALIBRATED)
        if self.format not in known:
            raise ValueError(f"format must be one of {', '.join(known)}, not {self.format!r}")
        if self.tail_format not in ("auto", *FLOATS):
            raise ValueError(f"tail_format must be auto, fp32 or bf16, not {self.tail_format!r}")
        if not _integer(self.tail_tokens) or self.tail_tokens < 0:
            raise ValueError(f"tail_tokens must be at least 0, not {self.tail_tokens!r}")
        if self.format == CALIBRATED:
            self._check_calibrated()

    def _check_calibrated(self) -> None:
        if self.budget_bytes is None:
            raise ValueError(f"format {CALIBRATED} is one chosen for a budget_bytes: give that too")
        for name in ("tail_tokens", "tail_format"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name}={value!r}: format {CALIBRATED} brings its own; leave it out"
                )

    def _check(self, policy: KVPolicy) -> None:
        if self.budget_bytes is not None:
            if self.budget_tokens is not None:
                raise ValueError(
                    f"give budget_tokens ({self.budget_tokens}) or budget_bytes"
                    f" ({self.budget_bytes}), not both"
                )
            if not _integer(self.budget_bytes) or self.budget_bytes < 1:
                raise ValueError(f"budget_bytes must be at least 1, not {self.budget_bytes!r}")
            return
        if not _integer(self.budget_tokens) or self.budget_tokens < MIN_BUDGET:
            raise ValueError(
                f"budget_tokens must be at least {MIN_BUDGET} with a policy,"
                f" not {self.budget_tokens!r}"
            )
        if not _integer(self.window) or self.window < 1:
            raise ValueError(f"window must be at least 1, not {self.window!r}")
        reason = policy.refuses(self.budget_tokens, self.window)
        if reason is not None:
            raise ValueError(f"policy {policy}: {reason}")

    def cells(self, model: torch.dtype) -> KVFormat:
        """How cells of a model of that dtype are stored."""
        assert self.format != CALIBRATED, "which it is, `measured` knows"
        return format_of(self.format, self.tail_format, self.tail_tokens, model)

    def sized(self, shape: KVShape, model: torch.dtype) -> KVSpec:
        """This, with its bytes as cells of such a model; ValueError if they hold next to none."""
        if self.budget_bytes is None:
            return self
        heads = shape.layers * shape.kv_heads
        cells = self.cells(model).cells_in(self.budget_bytes / heads, shape.head_dim, self.bias)
        if cells < MIN_BUDGET:
            raise ValueError(
                f"budget_bytes={self.budget_bytes} holds {cells} cells of each of {heads} heads in"
                f" {self.format} cells; it must hold at least {MIN_BUDGET}"
            )
        return replace(self, budget_tokens=cells, budget_bytes=None)

    def measured(self, model: Path) -> KVSpec:
        """This, with what was measured of the model whose files lie there."""
        spec = replace(self, allocation=self.allocation.measured(model))
        if self.format != CALIBRATED:
            return spec
        return replace(spec, **chosen_cells(model, self.breadth()))

    def breadth(self) -> dict[str, object]:
        """What a choice of cells is measured for, and holds for alone; as JSON has it."""
        return {
            "budget_bytes": self.budget_bytes,
            "policy": str(self.policy),
            "window": self.window,
        }

    @property
    def budget(self) -> int:
        """`budget_tokens`; FULL without a policy."""
        return FULL if self.budget_tokens is None else self.budget_tokens

    @property
    def queries(self) -> int:
        """How many last queries of a slot are remembered."""
        return 0 if self.policy is None else self.policy.remembers(self.budget, self.window)

    @property
    def bias(self) -> bool:
        """Whether cells carry a bias."""
        return self.policy is not None and self.policy.bias

    def refuses(self, asked: int | str | None) -> str | None:
        """Why a request can't have the budget that it asks for; None if it can."""
        if asked is None or (self.policy is None and asked == "full"):
            return None
        if self.policy is None:
            return f"kv_budget={asked}: this cache has no policy and holds every cell; leave it out"
        if isinstance(asked, str):
            if self.allow_full:
                return None
            return 'kv_budget="full" isn\'t allowed here (KVSpec.allow_full, --kv-allow-full)'
        if not MIN_BUDGET <= asked <= self.budget:
            return f"kv_budget must be from {MIN_BUDGET} to this cache's {self.budget}, not {asked}"
        reason = self.policy.refuses(asked, self.window)
        return reason and f"kv_budget={asked}: policy {self.policy}: {reason}"

    def granted(self, asked: int | str | None) -> int:
        """The budget of a request that asks so; this cache's own where it can't have another."""
        if isinstance(asked, str):
            return FULL if self.allow_full else self.budget
        return self.budget if asked is None else min(asked, self.budget)
