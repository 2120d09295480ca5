"""VaSE: its scores, what it reserves, and that its chance is the one that it should be."""

from itertools import combinations, permutations

import pytest
import torch

from engine.cache.noise import normal, uniform
from engine.cache.policies.vase import VaSE
from engine.cache.policy import KVSpec
from engine.cache.view import LayerView
from tests.cache.formulas import attended, pooled
from tests.cache.views import make_view, run

COUNTS = [[90, 71], [83, 80]]


def keyed(view: LayerView, first: int = 0) -> LayerView:
    return view._replace(key=torch.arange(first, first + len(view.pos)))


@pytest.mark.parametrize(("budget", "recent"), [(200, 64), (24, 12)])
def test_attention_is_over_what_isnt_recent(budget: int, recent: int) -> None:
    policy = VaSE()
    assert policy.remembers(budget, 128) == recent
    view = keyed(make_view(recent, COUNTS))
    scores = policy.score(view, budget)
    for slot, heads in enumerate(COUNTS):
        for head, cells in enumerate(heads):
            seen = attended(view, slot, head, recent, "softmax")
            expected = torch.tensor(pooled(seen, 5, "mean"))
            torch.testing.assert_close(scores[slot, head, :cells], expected, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("policy", [VaSE(), VaSE(large=0.1, sinks=2, recent=8)], ids=repr)
@pytest.mark.parametrize("budget", [16, 48])
def test_what_stays_is_wide_recent_or_drawn(policy: VaSE, budget: int) -> None:
    """The choice by hand: each cell's key to the draw is log p + Gumbel noise."""
    view = keyed(make_view(policy.remembers(budget, 64), COUNTS, gaps=False))
    weights = policy.utility(view, budget)
    keep = policy.compact(view, weights, torch.full((2, 2), budget)).keep
    u = uniform(view)
    sinks, recent = policy.sizes(budget)
    for slot, heads in enumerate(COUNTS):
        for head, cells in enumerate(heads):
            older = list(range(cells - recent))
            value, pos = view.v[slot, head], view.pos[slot, head]
            wide = sorted(
                older,
                key=lambda i, value=value, pos=pos: (  # type: ignore[misc]
                    float("inf") if pos[i] < sinks else float(value[i].max() - value[i].min()),
                    i,
                ),
            )[-max(int(budget * policy.large), sinks) :]
            p = weights[slot, head].double()
            drawn = sorted(
                set(older) - set(wide),
                key=lambda i, p=p, slot=slot, head=head: float(  # type: ignore[misc]
                    p[i].clamp(min=1e-300).log() - (-u[slot, head, i].log()).log()
                ),
            )[-(budget - recent - len(wide)) :]
            expected = sorted([*wide, *drawn, *range(cells - recent, cells)])
            assert keep[slot, head].tolist() == expected


def test_drawing_follows_the_exact_probabilities() -> None:
    """Without replacement, in proportion to attention: each set as often as it should be."""
    draws, p = 20_000, [0.4, 0.3, 0.15, 0.1, 0.05]
    view = keyed(make_view(0, [[5]])._replace(layer=torch.tensor([3])), 1000)
    view = view._replace(
        **{name: getattr(view, name).expand(draws, *[-1] * 3) for name in ("k", "v")},
        pos=view.pos.expand(draws, -1, -1),
        valid=view.valid.expand(draws, -1, -1),
        key=torch.arange(draws) * 977,
    )
    policy = VaSE(large=0.0, sinks=0, recent=0)
    weights = torch.tensor(p).expand(draws, 1, -1)
    keep = policy.compact(view, weights, torch.full((draws, 1), 2)).keep[:, 0]  # [draws, 2]
    for pair in combinations(range(5), 2):
        exact = sum(p[a] * p[b] / (1 - p[a]) for a, b in permutations(pair))
        got = float((keep == torch.tensor(pair)).all(-1).double().mean())
        assert abs(got - exact) < 4 * (exact * (1 - exact) / draws) ** 0.5, pair


def test_leverage_is_the_product_of_projected_lengths() -> None:
    policy = VaSE(variant="dkv", rank=6)
    assert policy.remembers(64, 64) == 0
    view = keyed(make_view(0, COUNTS))
    project = normal(view, 8 * 6).view(2, 2, 8, 6) / 6**0.5
    scores = policy.score(view, 24)
    for slot, heads in enumerate(COUNTS):
        for head, cells in enumerate(heads):
            products = []
            for i in range(cells):
                k = view.k[slot, head, i].double() @ project[slot, head]
                v = view.v[slot, head, i].double() @ project[slot, head]
                products.append(float(k @ k) * float(v @ v))
            expected = torch.tensor(products) / sum(products)
            torch.testing.assert_close(scores[slot, head, :cells], expected, rtol=1e-4, atol=1e-7)


def test_projections_are_drawn_afresh_or_once() -> None:
    view, other = keyed(make_view(0, COUNTS)), keyed(make_view(0, COUNTS), 50)
    for fresh in (True, False):
        policy = VaSE(variant="dkv", fresh=fresh)
        assert torch.equal(policy.score(view, 24), policy.score(view, 24))
        assert torch.equal(policy.score(view, 24), policy.score(other, 24)) != fresh
    drawn = normal(view, 20_000)
    assert abs(float(drawn.mean())) < 0.02
    assert abs(float(drawn.var()) - 1) < 0.03
    assert len(set(drawn.flatten().tolist())) == drawn.numel(), "heads and slots have their own"


@pytest.mark.parametrize("variant", ["attnv", "dkv"])
def test_the_same_key_keeps_the_same_and_another_keeps_others(variant: str) -> None:
    policy = VaSE(variant=variant)  # type: ignore[arg-type]
    view = keyed(make_view(policy.remembers(24, 64), COUNTS))
    budget = torch.full((2, 2), 24)
    first = run(policy, view, budget, 24)
    assert torch.equal(run(policy, view, budget, 24), first)
    assert not torch.equal(run(policy, keyed(view, 7), budget, 24), first)
    assert not torch.equal(
        run(policy, view._replace(layer=torch.full_like(view.layer, 2)), budget, 24), first
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"variant": "attn"}, "variant must be attnv or dkv"),
        ({"large": 1.5}, "large must be from 0 to 1"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"large": 0.6}, "32 recent cells and 38 wide ones leave nothing of a budget of 64"),
        ({"recent": 60}, "60 recent cells and 16 wide ones leave nothing"),
    ],
)
def test_settings_that_cannot_work_are_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVSpec(policy=VaSE(**fields), budget_tokens=64)  # type: ignore[arg-type]
