"""Compactions that replace rows and give biases: what attention sees, and who shares it."""

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.cache.allocations.uniform import Uniform
from engine.cache.choose import keep_best
from engine.cache.noise import uniform
from engine.cache.policies.tam import TAM
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.sizes import Sizes
from engine.cache.view import Compaction, KVShape, LayerView
from tests.cache.harness import SHAPE, catch_up, make_cache, make_seq, qkv, step
from tests.cache.scripted import read_biases
from tests.cache.test_policies import view_for


@dataclass(frozen=True)
class Replacing(KVPolicy):
    """Keeps every other of the cells, with keys, values and biases that are told by position."""

    bias: bool = True
    rows: tuple[str, ...] = ("k", "v", "bias")

    def utility(self, view: LayerView, budget: int) -> Tensor:
        return (view.pos % 2).float()

    def compact(self, view: LayerView, utility: Tensor, budget: Tensor) -> Compaction:
        keep = keep_best(utility, view.valid, budget // 2)
        pos = view.pos.gather(-1, keep.clamp(min=0)).float()
        row = pos[..., None].expand(*pos.shape, view.k.shape[-1])
        given = {"k": row.cos(), "v": row.sin(), "bias": (pos / 10).sin()}
        return Compaction(keep, **{name: given[name] for name in self.rows})


@pytest.mark.parametrize("rows", [("k",), ("v", "bias"), ("k", "v", "bias")])
def test_attention_takes_the_rows_that_replace_others(rows: tuple[str, ...]) -> None:
    cache = make_cache(KVSpec(policy=Replacing(rows=rows), budget_tokens=20, window=10))
    seq = make_seq(range(32), 30)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    assert cache.reserve(seq, slot, 30) == 30
    step(cache, [(seq, slot, 30)])
    cache.compress([slot])
    assert cache.reserve(seq, slot, 2) == 2
    (out,) = step(cache, [(seq, slot, 2)])
    kept = torch.arange(11, 30, 2)
    for layer in range(SHAPE.layers):
        assert [p.tolist() for p in cache.positions(slot, layer)] == [[*kept.tolist(), 30, 31]] * 2
        q, k, v = qkv(seq, 0, 32, layer)
        row = kept[:, None, None].float().expand(-1, SHAPE.kv_heads, SHAPE.head_dim)
        keys = torch.cat((row.cos() if "k" in rows else k[kept], k[30:]))
        values = torch.cat((row.sin() if "v" in rows else v[kept], v[30:]))
        bias = torch.cat(((kept / 10).sin() * ("bias" in rows), torch.zeros(2)))
        for head in range(SHAPE.q_heads):
            own = head // SHAPE.group
            logits = keys[:, own] @ q[31, head] * SHAPE.head_dim**-0.5 + bias
            torch.testing.assert_close(
                out[layer, 1, head], logits.softmax(-1) @ values[:, own], atol=1e-5, rtol=1e-5
            )


def test_a_policy_that_gives_biases_says_so(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(KVSpec(policy=Replacing(bias=False), budget_tokens=20, window=10))
    seq = make_seq(range(31), 30)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot)
    assert "gives biases: it must say so" in (cache.failure(slot) or "")
    caplog.clear()


def test_a_fork_copies_biases_before_it_writes() -> None:
    cache = make_cache(KVSpec(policy=Replacing(), budget_tokens=20, window=10))
    seq = make_seq(range(30))
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot)
    biases = read_biases(cache, slot)
    assert biases[0][0] == pytest.approx([math.sin(p / 10) for p in range(11, 30, 2)])
    child = make_seq([*range(30), 99])
    new = cache.fork(slot, child)
    assert new is not None
    catch_up(cache, child, new)  # into the partly filled page that both have
    cache.release(slot)
    assert read_biases(cache, new) == [[[*cells, 0.0] for cells in heads] for heads in biases]
    # pages that had biases are taken by others, whose cells have none
    other = make_seq(range(40, 69))
    slot = cache.admit(other).slot  # type: ignore[union-attr]
    catch_up(cache, other, slot)
    assert read_biases(cache, slot) == [[[0.0] * 29] * SHAPE.kv_heads] * SHAPE.layers


def test_biases_are_counted_beside_the_cells() -> None:
    plain, biased = (
        make_cache(KVSpec(policy=Replacing(bias=bias), budget_tokens=20, window=10)).stats()
        for bias in (False, True)
    )
    assert plain.page_bytes == biased.page_bytes
    assert biased.side_bytes - plain.side_bytes == biased.pages * 16 * 4
    cache = make_cache(KVSpec(policy=Replacing(), budget_tokens=20, window=10))
    seq = make_seq(range(17))
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    catch_up(cache, seq, slot)
    stats = cache.stats()
    per_slot = plain.side_bytes // 4
    assert stats.used_side_bytes == per_slot + stats.used_pages * 64
    sizes = Sizes(SHAPE, KVSpec(policy=TAM(), budget_tokens=64), torch.float32)
    assert sizes.page_bytes + sizes.page_side_bytes == stats.page_bytes + 64


@dataclass(frozen=True)
class Steep(Uniform):
    """The first layers hold a fraction of what the last ones do."""

    def layer_budgets(self, shape: KVShape, budget: int) -> list[int]:
        return [budget // 4, 2 * budget - budget // 4]


@pytest.mark.parametrize("prompt", [5, 40, 90])
def test_no_layer_exceeds_the_peak_of_its_own_budget(prompt: int) -> None:
    policy = TAM(queries=4)
    spec = KVSpec(policy=policy, budget_tokens=24, window=10, allocation=Steep())
    cache = make_cache(spec, max_len=300, pages=100)
    seq = make_seq(range(prompt), max_tokens=150)
    slot = cache.admit(seq).slot  # type: ignore[union-attr]
    budgets, points = spec.allocation.layer_budgets(SHAPE, 24), []
    while cache.computed(slot) < prompt + 150:
        if cache.computed(slot) == len(seq.tokens):
            seq.tokens.append(len(seq.tokens))
            if len(seq.tokens) % 7 == 0:
                seq.thought_ends.append(len(seq.tokens))
        count = cache.reserve(seq, slot, len(seq.tokens) - cache.computed(slot))
        step(cache, [(seq, slot, count)])
        for layer, budget in enumerate(budgets):
            peak = policy.peak(prompt, prompt + 150, budget, 10)
            assert cache.held(slot)[layer].sum() <= SHAPE.kv_heads * peak
        before = cache.stats().evicted_cells
        cache.compress([slot])
        if cache.stats().evicted_cells > before:
            points.append(cache.computed(slot))
        cache.check()
    assert any(at % 7 == 0 for at in points), "a thought brought one forward"
    assert max(b - a for a, b in pairwise(points)) <= 10
    assert cache.held(slot)[1].sum() > SHAPE.kv_heads * 30, "the large layer fills up"


def test_noise_is_keyed_by_slot_layer_head_and_position() -> None:
    view = view_for(TAM(), [[50, 50], [50, 50]])
    drawn = uniform(view)
    assert ((drawn > 0) & (drawn < 1)).all()
    assert drawn.dtype == torch.float64
    one = view._replace(
        pos=view.pos[1:, :, :20],
        key=None if view.key is None else view.key[1:],
        layer=torch.tensor([1]),
    )
    assert torch.equal(uniform(one), drawn[1:, :, :20])
    same = view._replace(pos=torch.arange(50).expand(2, 2, 50))
    assert len(set(uniform(same).flatten().tolist())) == 200
    assert not (uniform(same) == uniform(same._replace(layer=torch.tensor([2, 2])))).any()
