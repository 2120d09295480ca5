"""How allocations share cells out, against brute force and by hand."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.cache.allocation import Allocation
from engine.cache.allocations.adakv import AdaKV
from engine.cache.allocations.pyramid import Pyramid
from engine.cache.allocations.reasonalloc import ReasonAlloc, wave_file
from engine.cache.allocations.uniform import Uniform
from engine.cache.choose import best_of_layer, rounded, shared
from engine.cache.registry import allocation_classes, allocation_from_text
from engine.cache.view import KVShape
from tests.cache.scripted import Ragged

SHAPE = KVShape(layers=6, q_heads=8, kv_heads=4, head_dim=8)
WAVE = (90.0, 30.0, 12.0, 40.0, 9.0, 160.0)


def all_of_them() -> list[Allocation]:
    found = [c(demand=WAVE) if c is ReasonAlloc else c() for c in allocation_classes().values()]
    return [*found, ReasonAlloc(layers=False, per_cell=True), Ragged(), AdaKV(safe=1.0)]


each_allocation = pytest.mark.parametrize("allocation", all_of_them(), ids=repr)


def utilities(slots: int, cells: int, seed: int = 0) -> Tensor:
    """Heads of very different worth."""
    noise = torch.Generator().manual_seed(seed)
    scale = torch.tensor([0.1, 1.0, 3.0, 0.5])[:, None]
    return torch.randn(slots, SHAPE.kv_heads, cells, generator=noise).exp() * scale


@each_allocation
@pytest.mark.parametrize("budget", [24, 25, 127, 128, 1000])
def test_budgets_are_shared_out_exactly(allocation: Allocation, budget: int) -> None:
    layers = allocation.layer_budgets(SHAPE, budget)
    assert len(layers) == SHAPE.layers
    assert sum(layers) == SHAPE.layers * budget
    assert min(layers) >= 1
    for total in layers:
        for cells, held in ((200, (200, 150, 7, 90)), (30, (30, 30, 30, 30))):
            valid = torch.arange(cells) < torch.tensor(held)[:, None]
            valid = valid.expand(3, -1, -1)
            heads = allocation.head_budgets(utilities(3, cells), valid, total)
            assert heads.shape == (3, SHAPE.kv_heads)
            assert heads.dtype == torch.int64
            assert (heads.sum(-1) == SHAPE.kv_heads * total).all()
            assert heads.min() >= 0


@each_allocation
def test_a_slot_is_given_alone_what_it_is_in_company(allocation: Allocation) -> None:
    utility = utilities(3, 90)
    valid = (
        torch.arange(90) < torch.tensor([[90, 41, 60, 80], [50] * 4, [5, 90, 64, 33]])[..., None]
    )
    together = allocation.head_budgets(utility, valid, 32)
    for slot in range(3):
        alone = allocation.head_budgets(utility[slot, None], valid[slot, None], 32)
        assert torch.equal(alone[0], together[slot])


@given(st.data())
def test_shares_keep_their_bounds_and_their_proportions(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    number = st.floats(0, 100)
    weights = torch.tensor([data.draw(number) for _ in range(n)], dtype=torch.float64)
    least = torch.tensor([data.draw(st.integers(0, 20)) for _ in range(n)])
    most = least + torch.tensor([data.draw(st.integers(0, 50)) for _ in range(n)])
    total = data.draw(st.integers(int(least.sum()), int(most.sum())))
    shares = shared(weights, total, least, most)
    assert shares.sum() == total
    assert (shares >= least).all()
    assert (shares <= most).all()
    inner = ((shares > least) & (shares < most) & (weights > 1e-3)).nonzero()[:, 0].tolist()
    for i in inner:  # whoever isn't held by a bound has the same scale, to a cell
        for j in inner:
            assert abs(float(shares[i]) - float(shares[j] * weights[i] / weights[j])) <= 1 + float(
                weights[i] / weights[j]
            )


def test_shares_by_hand() -> None:
    def of(weights: list[float], total: int, least: float, most: float) -> list[int]:
        w = torch.tensor(weights)
        return shared(w, total, torch.full_like(w, least), torch.full_like(w, most)).tolist()

    assert of([1, 2, 3], 60, 0, 100) == [10, 20, 30]
    assert of([1, 2, 7], 40, 10, 20) == [10, 10, 20]  # 10 is both a bound and a share
    assert of([0, 0, 9], 30, 4, 16) == [7, 7, 16]
    assert of([5, 5], 50, 0, 10) == [25, 25]  # more than all may have
    assert rounded(torch.tensor([1.5, 1.25, 1.25]), 4).tolist() == [2, 1, 1]


def test_best_of_layer_counts_each_heads_best() -> None:
    utility, valid = utilities(2, 40), torch.ones(2, 4, 40, dtype=torch.bool)
    valid[1, 2, 10:] = False
    counts = best_of_layer(utility, valid, 60)
    for slot in range(2):
        cells = [
            (float(utility[slot, h, i]), h)
            for h in range(4)
            for i in range(40)
            if valid[slot, h, i]
        ]
        best = [h for _, h in sorted(cells, reverse=True)[:60]]
        assert counts[slot].tolist() == [best.count(h) for h in range(4)]


def test_adakv_keeps_what_the_layer_needs_most() -> None:
    """The best of the layer by brute force, once each head has its own safe ones."""
    utility, valid = utilities(1, 50), torch.ones(1, 4, 50, dtype=torch.bool)
    total, safe = 20, 4
    heads = AdaKV(safe=0.2).head_budgets(utility, valid, total)[0].tolist()
    ranked = [sorted(row, reverse=True) for row in utility[0].tolist()]
    rest = sorted((x, h) for h, row in enumerate(ranked) for x in row[safe:])
    won = [h for _, h in rest[-(4 * total - 4 * safe) :]]
    assert heads == [safe + won.count(h) for h in range(4)]
    assert min(heads) >= safe


def test_reasonalloc_by_the_papers_steps() -> None:
    """Where clipping leaves nothing to scale again, ours is the paper's own arithmetic."""
    utility, valid = utilities(1, 60), torch.ones(1, 4, 60, dtype=torch.bool)
    heads = ReasonAlloc(layers=False).head_budgets(utility, valid, 30)[0]
    pooled = utility.flatten().sort(descending=True).values[4 * 30 - 1]
    demand = (utility[0] >= pooled).sum(-1).double() ** 0.5
    shares = demand / demand.sum() * 120
    assert (shares >= 0.25 * 30).all()
    assert (heads - shares).abs().max() < 1
    layers = ReasonAlloc(demand=WAVE).layer_budgets(SHAPE, 100)
    demand = torch.tensor(WAVE).double() ** 0.5
    shares = demand / demand.sum() * 600
    assert shares.min() >= 25
    assert shares.max() <= 200
    assert (torch.tensor(layers) - shares).abs().max() < 1


def test_protected_cells_are_everybodys_best() -> None:
    utility, valid = utilities(1, 60), torch.ones(1, 4, 60, dtype=torch.bool)
    utility[0, 0] = -100.0
    utility[..., -6:] = torch.inf
    for allocation in (AdaKV(safe=0.0), ReasonAlloc(layers=False, head_least=0.0)):
        heads = allocation.head_budgets(utility, valid, 20)[0]
        assert heads[0] >= 6
        assert heads[0] < 20


def test_pyramid_falls_linearly_to_a_betath() -> None:
    layers = Pyramid(beta=5, recent=0).layer_budgets(SHAPE, 100)
    assert layers == [180, 148, 116, 84, 52, 20]
    layers = Pyramid(beta=20, recent=20).layer_budgets(SHAPE._replace(layers=3), 120)
    assert layers == [215, 120, 25]
    assert Pyramid(recent=64).layer_budgets(SHAPE._replace(layers=2), 10) == [15, 5]
    assert Pyramid().layer_budgets(SHAPE._replace(layers=1), 10) == [10]


def test_a_profile_is_read_from_beside_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    with pytest.raises(ValueError, match=r"no .*gguf\.kv-wave\.json: write it with `taut calib"):
        ReasonAlloc().measured(model)
    wave_file(model).write_text(json.dumps({"demand": WAVE}))
    assert ReasonAlloc().measured(model) == ReasonAlloc(demand=WAVE)
    elsewhere = tmp_path / "other.json"
    elsewhere.write_text(json.dumps({"demand": [1, 2]}))
    named = ReasonAlloc(profile=str(elsewhere)).measured(model)
    assert named.layer_budgets(SHAPE._replace(layers=2), 8) == [7, 9]
    with pytest.raises(ValueError, match="profile of 6 layers and has one of 2"):
        named.layer_budgets(SHAPE, 8)
    with pytest.raises(ValueError, match="profile of 6 layers and has none"):
        ReasonAlloc().layer_budgets(SHAPE, 8)
    assert ReasonAlloc(layers=False).measured(model) == ReasonAlloc(layers=False)
    assert Uniform().measured(model) == Uniform()
    for broken in ("{", "[]", "{}", '{"demand": [0]}', '{"demand": "x"}', '{"demand": []}'):
        elsewhere.write_text(broken)
        with pytest.raises(ValueError, match=r"other\.json"):
            ReasonAlloc(profile=str(elsewhere)).measured(model)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("uniform(by=2)", "there is no field by"),
        ("adakv(safe=2.0)", "safe must be from 0 to 1, not 2.0"),
        ("pyramid(beta=0.5)", "beta must be at least 1, not 0.5"),
        ("reasonalloc(layer_most=0.5)", "layer_most must be at least 1"),
        ("reasonaloc()", "there is no KV allocation 'reasonaloc'; known: adakv, pyramid, reason"),
        ("reasonalloc(", r"'reasonalloc\(' isn't a KV allocation: write name or name\(field"),
    ],
)
def test_bad_text_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        allocation_from_text(text)


def test_text_makes_an_allocation() -> None:
    assert allocation_from_text("reasonalloc(layers=False)") == ReasonAlloc(layers=False)
    assert allocation_from_text("adakv") == AdaKV()
