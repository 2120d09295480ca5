"""What every policy in the folder must keep to, and what each one is meant to choose."""

import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

from engine.cache import policies
from engine.cache.allocation import Allocation
from engine.cache.allocations.adakv import AdaKV
from engine.cache.allocations.reasonalloc import ReasonAlloc
from engine.cache.allocations.uniform import Uniform
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.vase import VaSE
from engine.cache.policy import KVPolicy, KVSpec, ScorePolicy
from engine.cache.view import LayerView
from tests.cache.harness import SHAPE, catch_up, make_cache, make_seq
from tests.cache.scripted import Ragged
from tests.cache.views import make_view, run


def found() -> list[type[KVPolicy]]:
    modules = [
        importlib.import_module(f"{policies.__name__}.{module.name}")
        for module in pkgutil.iter_modules(policies.__path__)
    ]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, KVPolicy)
        and value.__module__ == module.__name__
    ]


def view_for(policy: KVPolicy, counts: list[list[int]], gaps: bool = True) -> LayerView:
    return make_view(policy.remembers(24, 32), counts, gaps, bias=policy.bias)


ALL = [*(cls() for cls in found()), VaSE(variant="dkv")]
ALLOCATIONS = [Uniform(), Ragged(by=6), AdaKV(), ReasonAlloc(demand=(3.0, 1.0))]
every_policy = pytest.mark.parametrize("policy", ALL, ids=repr)


def test_the_folder_is_read() -> None:
    assert {SinksRecent, SnapKV} <= set(found())


@every_policy
@pytest.mark.parametrize("size", [4, 17, 32, 64])
def test_choices_are_valid_ascending_and_within_budget(policy: KVPolicy, size: int) -> None:
    view = view_for(policy, [[90, 41], [64, 80], [5, 100]])
    held = view.valid.sum(-1)
    budget = torch.tensor([[size, size], [size - 3, size + 3], [size, size]]).minimum(held)
    keep = run(policy, view, budget, size)
    there = keep >= 0
    assert (there.sum(-1) <= budget).all()
    assert (there.int().diff(dim=-1) <= 0).all(), "padding at the end"
    assert (keep.diff(dim=-1)[there[..., 1:]] > 0).all(), "ascending and unique"
    assert view.valid.gather(-1, keep.clamp(min=0))[there].all()
    if isinstance(policy, ScorePolicy):
        assert (there.sum(-1) == budget).all()


@every_policy
def test_sinks_and_recent_cells_stay(policy: KVPolicy) -> None:
    if not isinstance(policy, ScorePolicy):
        pytest.skip("protects nothing")
    for size, sinks in ((64, 4), (16, 2), (7, 0)):
        view = view_for(policy, [[90, 70]], gaps=False)
        keep = run(policy, view, torch.tensor([[size, size]]), size)
        recent = min(policy.usual_recent, size // 2)
        for head, count in enumerate((90, 70)):
            kept = set(view.pos[0, head, keep[0, head]].tolist())
            first = int(view.pos[0, head, 0])
            assert set(range(first, sinks)) <= kept
            assert set(range(first + count - recent, first + count)) <= kept


@every_policy
def test_under_budget_everything_stays(policy: KVPolicy) -> None:
    view = view_for(policy, [[30, 12]])
    keep = run(policy, view, torch.tensor([[30, 12]]), 40)
    assert keep[0, 0].tolist() == list(range(30))
    assert keep[0, 1].tolist() == [*range(12), *[-1] * 18]


@every_policy
def test_a_slot_chooses_alone_as_in_company(policy: KVPolicy) -> None:
    counts = [[90, 41], [64, 80], [50, 100]]
    view = view_for(policy, counts)
    budget = torch.tensor([[20, 22], [30, 24], [20, 20]])
    together = policy.compact(view, policy.utility(view, 24), budget)
    for slot, heads in enumerate(counts):
        cells = max(heads)
        one = view._replace(
            layer=view.layer[slot, None],
            k=view.k[slot, None, :, :cells],
            v=view.v[slot, None, :, :cells],
            pos=view.pos[slot, None, :, :cells],
            valid=view.valid[slot, None, :, :cells],
            queries=None if view.queries is None else view.queries[slot, None],
            query_pos=None if view.query_pos is None else view.query_pos[slot, None],
            bias=None if view.bias is None else view.bias[slot, None, :, :cells],
            thoughts=None if view.thoughts is None else view.thoughts[slot, None],
            key=None if view.key is None else view.key[slot, None],
        )
        alone = policy.compact(one, policy.utility(one, 24), budget[slot, None])
        for head in range(len(heads)):
            mine, theirs = alone.keep[0, head], together.keep[slot, head]
            count = int((mine >= 0).sum())
            assert mine[:count].tolist() == theirs[theirs >= 0].tolist()
            for name in ("k", "v", "bias"):
                got, expected = getattr(alone, name), getattr(together, name)
                if expected is not None:
                    both = got[0, head, :count], expected[slot, head, :count]
                    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


@every_policy
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_in_the_cache_its_cells_and_pages_are_bounded(
    policy: KVPolicy, allocation: Allocation
) -> None:
    """A layer never holds more than its heads' peaks at its budget, nor more pages than that."""
    spec = KVSpec(policy=policy, budget_tokens=24, window=32, allocation=allocation)
    cache = make_cache(spec, pages=96, max_len=240)
    prompt, heads = 50, SHAPE.kv_heads
    seq = make_seq(range(prompt), max_tokens=180)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    budgets = allocation.layer_budgets(SHAPE, 24)
    compactions = 0
    while (total := len(seq.tokens)) < 220:
        before = cache.stats().evicted_cells
        catch_up(cache, seq, slot)
        cache.check()
        compactions += cache.stats().evicted_cells > before
        peaks = np.array([policy.peak(prompt, total, budget, 32) for budget in budgets])
        assert (cache.held(slot).sum(1) <= heads * peaks).all()
        assert cache.stats().used_pages <= (heads * (-(-peaks // 16) + 1)).sum()
        seq.tokens.append(total)
    assert compactions >= 4
    assert cache.stats().evicted_cells == 2 * heads * 219 - cache.held(slot).sum()
    cache.release(slot)
    cache.check()
    assert cache.stats().used_pages == 0


@every_policy
def test_the_same_seed_keeps_the_same_and_a_neighbour_changes_nothing(policy: KVPolicy) -> None:
    """Alone, again, and beside another sequence that is compacted in between."""
    spec = KVSpec(policy=policy, budget_tokens=24, window=32)
    found = []
    for company in (False, False, True):
        cache = make_cache(spec, pages=128, max_len=240)
        other = make_seq(range(7, 90), 20, max_tokens=150)
        if company:
            beside = cache.admit(other).slot  # type: ignore[union-attr]
        seq = make_seq(range(40), 30, max_tokens=150)
        slot = cache.admit(seq).slot  # type: ignore[union-attr]
        for _ in range(5):
            seq.tokens.extend(range(len(seq.tokens), len(seq.tokens) + 23))
            if company:
                other.tokens.extend(range(9))
                catch_up(cache, other, beside)
            catch_up(cache, seq, slot)
        held = [[p.tolist() for p in cache.positions(slot, n)] for n in range(SHAPE.layers)]
        found.append(held)
    assert found[0] == found[1] == found[2]


@every_policy
@pytest.mark.parametrize("allocation", [Uniform(), Ragged(by=6), AdaKV()], ids=repr)
def test_layers_together_hold_what_each_would_alone(
    policy: KVPolicy, allocation: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same positions, and cells that differ by no more than the order of a sum."""
    shape = SHAPE._replace(layers=4)
    spec = KVSpec(policy=policy, budget_tokens=24, window=32, allocation=allocation)
    caches = []
    for at_once in (policy.cells_at_once, 1):  # a view of one cell holds one layer
        monkeypatch.setattr(type(policy), "cells_at_once", at_once)
        cache = make_cache(spec, shape=shape, pages=256, max_len=240)
        seq = make_seq(range(200), 50)
        slot = cache.admit(seq).slot  # type: ignore[union-attr]
        out = catch_up(cache, seq, slot)  # [L, T, Hq, D]
        held = [[p.tolist() for p in cache.positions(slot, n)] for n in range(shape.layers)]
        caches.append((held, out))
    (together, out), (alone, expected) = caches
    assert together == alone
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_sinks_recent_chooses_by_position_alone() -> None:
    spec = KVSpec(policy=SinksRecent(), budget_tokens=32, window=8)
    cache = make_cache(spec, pages=64)
    seq = make_seq(range(100), max_tokens=1)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot)
    last = 40 + (100 - 40) // 8 * 8  # compacted at 40 and every 8 after
    for layer in range(SHAPE.layers):
        for pos in cache.positions(slot, layer):
            assert pos.tolist() == [*range(4), *range(last - 28, 100)]


def test_equal_cells_the_later_stays() -> None:
    class Same(ScorePolicy):
        def score(self, view: LayerView, budget: int) -> torch.Tensor:
            return torch.zeros_like(view.pos, dtype=torch.float32)

    view = make_view(0, [[20, 20]])
    keep = run(Same(), view, torch.tensor([[6, 6]]), 6)
    assert keep[0, 0].tolist() == list(range(14, 20))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVSpec(budget_tokens=64), "budget_tokens=64 needs a policy"),
        (lambda: KVSpec(policy=SinksRecent()), "budget_tokens must be at least 4 with a policy"),
        (lambda: KVSpec(policy=SinksRecent(), budget_tokens=3), "at least 4 .* not 3"),
        (lambda: KVSpec(policy=SinksRecent(), budget_tokens=8, window=0), "window .* not 0"),
        (
            lambda: KVSpec(format="fp8"),  # type: ignore[arg-type]
            "format must be one of auto, fp32.* not 'fp8'",
        ),
        (
            lambda: KVSpec(policy=SinksRecent(sinks=16), budget_tokens=16),
            "16 sinks and 0 recent cells leave nothing of a budget of 16",
        ),
        (
            lambda: KVSpec(policy=SnapKV(recent=128), budget_tokens=64),
            "4 sinks and 128 recent cells leave nothing of a budget of 64",
        ),
        (lambda: KVSpec(policy=SnapKV(sinks=-1), budget_tokens=64), "sinks must be at least 0"),
        (lambda: SnapKV(queries=0), "queries must be at least 1"),
        (lambda: SnapKV(kernel=4), "kernel must be odd"),
        (
            lambda: SnapKV(group="sum"),  # type: ignore[arg-type]
            "group must be max, mean or softmax",
        ),
        (
            lambda: make_cache(KVSpec(policy=SnapKV(), budget_tokens=16, allocation=Lossy())),
            r"gives \[15, 15\] for 2 layers; they must sum to 16",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


class Lossy(Uniform):
    def layer_budgets(self, shape: object, budget: int) -> list[int]:
        return [budget - 1] * 2
