"""What each policy thinks of a cell, against its formula written out cell by cell."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.cache.policies.h2o import H2O
from engine.cache.policies.keydiff import KeyDiff
from engine.cache.policies.knorm import Knorm
from engine.cache.policies.rkv import RKV
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tova import TOVA
from engine.cache.policy import ScorePolicy
from engine.cache.view import LayerView
from tests.cache.formulas import attended, held, pooled, softmax
from tests.cache.views import make_view

COUNTS = [[90, 41], [23, 60]]


def view_of(policy: ScorePolicy, last: int | None = None) -> LayerView:
    """Cells and queries; the queries overlap the cells where `last` is theirs."""
    view = make_view(policy.queries, COUNTS, gaps=last is None)
    if view.query_pos is None:
        return view
    query_pos = view.query_pos.clone()
    if last is not None:
        query_pos = torch.arange(last - policy.queries + 1, last + 1).expand(2, -1).clone()
    if policy.queries > 1:
        query_pos[0, 0] = -1  # there were fewer
    return view._replace(query_pos=query_pos)


def snapkv(policy: SnapKV, view: LayerView, slot: int, head: int) -> list[float]:
    seen = attended(view, slot, head, policy.queries, policy.group)
    return pooled(seen, policy.kernel, "max")


def alike(policy: RKV, keys: Tensor) -> list[float]:
    count = len(keys)
    cosine = [
        [
            0.0 if i == j else float(torch.cosine_similarity(keys[i], keys[j], 0))
            for j in range(count)
        ]
        for i in range(count)
    ]
    if policy.threshold is not None:
        for row in cosine:
            near = [j for j, c in enumerate(row) if c > policy.threshold]
            row[near[-1] if near else 0] = 0.0
    mean = {j: sum(row[j] for row in cosine) / count for j in range(count)}
    return list(softmax(mean).values())


def rkv(policy: RKV, view: LayerView, slot: int, head: int) -> list[float]:
    seen = attended(view, slot, head, policy.queries, policy.group)
    seen = pooled(seen, policy.kernel, policy.pool)
    same = alike(policy, view.k[slot, head, : held(view, slot, head)])
    return [policy.mix * a - (1 - policy.mix) * b for a, b in zip(seen, same, strict=True)]


def h2o(policy: H2O, view: LayerView, slot: int, head: int) -> list[float]:
    return attended(view, slot, head, 0, "softmax")


def tova(policy: TOVA, view: LayerView, slot: int, head: int) -> list[float]:
    total = [0.0] * held(view, slot, head)
    for other in range(2):
        theirs = attended(view, slot, other, 0, "softmax")
        positions = view.pos[slot, other, : held(view, slot, other)].tolist()
        for i in range(len(total)):
            pos = int(view.pos[slot, head, i])
            if pos in positions:
                total[i] += theirs[positions.index(pos)] / 2
    return total


def knorm(policy: Knorm, view: LayerView, slot: int, head: int) -> list[float]:
    return [-math.sqrt(sum(x * x for x in key)) for key in view.k[slot, head].tolist()]


def keydiff(policy: KeyDiff, view: LayerView, slot: int, head: int) -> list[float]:
    keys = view.k[slot, head, : held(view, slot, head)]
    mean = torch.stack([key / key.norm() for key in keys]).mean(0)
    return [-float(torch.cosine_similarity(key, mean, 0)) for key in keys]


Formula = Callable[..., list[float]]
VASES = RKV(queries=9, mix=0.5, kernel=5, pool="mean", group="softmax", threshold=None)
CASES: list[tuple[ScorePolicy, Formula]] = [
    (SnapKV(), snapkv),
    (SnapKV(queries=3, kernel=1, group="mean"), snapkv),
    (SnapKV(queries=16, group="softmax"), snapkv),
    (RKV(), rkv),
    (VASES, rkv),
    (RKV(threshold=0.9, mix=0.0), rkv),
    (H2O(queries=20), h2o),
    (TOVA(), tova),
    (Knorm(), knorm),
    (KeyDiff(), keydiff),
]


@pytest.mark.parametrize("last", [None, 30], ids=["after", "among"])
@pytest.mark.parametrize(("policy", "formula"), CASES, ids=[repr(p) for p, _ in CASES])
def test_scores_are_the_formulas(policy: ScorePolicy, formula: Formula, last: int | None) -> None:
    view = view_of(policy, last)
    scores = policy.score(view, 24)
    for slot, heads in enumerate(COUNTS):
        for head, cells in enumerate(heads):
            expected = torch.tensor(formula(policy, view, slot, head)[:cells])
            got = scores[slot, head, :cells].float()
            torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_many_rows_of_the_similarity_matrix_are_one() -> None:
    """Blocks of rows don't show: the newest alike is spared whichever block it's in."""
    from engine.cache import scores

    k = torch.randn(1, 1, 700, 8, generator=torch.Generator().manual_seed(3))
    valid = torch.ones(1, 1, 700, dtype=torch.bool)
    expected = alike(RKV(), k[0, 0, :64])
    got = scores.redundancy(k[:, :, :64], valid[..., :64], 0.5)
    torch.testing.assert_close(got[0, 0], torch.tensor(expected))
    blocks = scores.redundancy(k, valid, 0.5)
    cosine = torch.nn.functional.normalize(k[0, 0], dim=-1)
    cosine = (cosine @ cosine.T).fill_diagonal_(0.0)
    newest = torch.where(cosine > 0.5, torch.arange(700), 0).amax(-1)
    cosine[torch.arange(700), newest] = 0.0
    torch.testing.assert_close(blocks[0, 0], cosine.mean(0).softmax(-1))


def test_tova_keeps_the_same_tokens_in_every_head() -> None:
    view = make_view(1, [[50, 50]])
    view = view._replace(pos=torch.arange(50).expand(1, 2, -1))
    policy = TOVA()
    keep = policy.compact(view, policy.utility(view, 20), torch.tensor([[20, 20]])).keep
    assert keep[0, 0].tolist() == keep[0, 1].tolist()
    assert keep[0, 0].tolist()[-1] == 49


def test_h2o_keeps_half_for_recent_cells() -> None:
    view = make_view(64, [[90]])
    policy = H2O()
    keep = policy.compact(view, policy.utility(view, 40), torch.tensor([[40]])).keep[0, 0].tolist()
    assert keep[-20:] == list(range(70, 90))
