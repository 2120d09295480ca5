"""The filters against their definitions, written down slowly."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.filters import Filters, draw_filtered
from engine.sampling.rowwise import draw, ranked, row_max, row_sums, top


def order_of(probs: list[float]) -> list[int]:
    return sorted(range(len(probs)), key=lambda i: (-probs[i], i))


def slow_keep(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that stay, likeliest first."""
    ids = order_of(probs)
    ids = [i for i in ids if probs[i] >= min_p * probs[ids[0]]]
    ids = ids[:top_k]
    mass = sum(probs[i] for i in ids)
    kept: list[int] = []
    while ids and sum(probs[i] for i in kept) < top_p * mass:
        kept.append(ids.pop(0))
    return kept


def slow_draw(probs: list[float], ids: list[int], uniform: float) -> int:
    target = uniform * sum(probs[i] for i in ids)
    reached = 0.0
    for i in ids:
        reached += probs[i]
        if reached > target:
            return i
    raise AssertionError("uniform is below 1")


def filters_of(top_k: int, top_p: float, min_p: float, rows: int = 1) -> Filters:
    return Filters(
        torch.full((rows,), top_k),
        torch.full((rows,), top_p, dtype=torch.float64),
        torch.full((rows,), min_p, dtype=torch.float64),
    )


# multiples of 1/64 add up exactly, so that no sum depends on its order; many are equal
weights = st.lists(st.integers(0, 12), min_size=1, max_size=40).filter(lambda w: sum(w) > 0)


@given(
    weights,
    st.integers(1, 45),
    st.sampled_from([1.0, 0.75, 0.5, 0.3, 1e-9]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 63),
    st.sampled_from([(), (1,), (3, 7), (4096,)]),
)
@settings(deadline=None, max_examples=300)
def test_filters_keep_and_draw_what_the_definition_does(
    weights: list[int],
    top_k: int,
    top_p: float,
    min_p: float,
    part: int,
    pools: tuple[int, ...],
) -> None:
    scale = 2 ** (sum(weights) - 1).bit_length()  # a last id takes what is missing to 1
    exact = [w / scale for w in [*weights, scale - sum(weights)]]
    uniform = part / 64
    expected = slow_draw(exact, slow_keep(exact, top_k, top_p, min_p), uniform)
    probs = torch.tensor([exact])
    drawn = draw_filtered(
        probs,
        filters_of(min(top_k, len(exact)), top_p, min_p),
        torch.tensor([uniform], dtype=torch.float64),
        pools,
    )
    assert drawn.tolist() == [expected]


def test_a_nucleus_wider_than_every_pool_is_found_exactly() -> None:
    vocab = 20_011
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab, generator=generator) * 0.5
    probs = logits.softmax(-1)
    rows = 40
    ids = draw_filtered(
        probs.expand(rows, -1).contiguous(),
        filters_of(vocab, 0.7, 0.0, rows),
        torch.linspace(0, 1 - 1e-12, rows, dtype=torch.float64),
    )
    order = probs.double().sort(descending=True, stable=True).indices
    mass = probs.double()[order].cumsum(0)
    kept = int((mass - probs.double()[order] < 0.7).sum())
    assert kept > 4096
    rank = torch.empty(vocab, dtype=torch.int64)
    rank[order] = torch.arange(vocab)
    assert int(rank[ids].max()) <= kept
    assert int(rank[ids[-1]]) >= kept - 2  # the last draw is at the prefix's end
    assert rank[ids].diff().min() >= 0  # likeliest first


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.integers(1, 70))
@settings(deadline=None)
def test_top_is_exact_among_equals(values: list[int], count: int) -> None:
    rows = torch.tensor([values, values[::-1]], dtype=torch.float32)
    best = top(rows, count)
    for row, got, ids in zip(rows.tolist(), best.values.tolist(), best.ids.tolist(), strict=True):
        expected = order_of(row)[:count]
        assert ids == expected
        assert got == [row[i] for i in expected]


def test_ranked_is_in_order() -> None:
    values = torch.randint(0, 50, (3, 2000), generator=torch.Generator().manual_seed(1)).float()
    pool = ranked(values, 300)
    for row, got, ids in zip(values, pool.values, pool.ids, strict=True):
        assert got.tolist() == row.sort(descending=True).values[:300].tolist()
        assert torch.equal(row[ids], got)
        same = got[1:] == got[:-1]
        assert bool((ids[1:] > ids[:-1])[same].all())


def test_row_max_is_the_lowest_of_equals() -> None:
    for vocab in (1, 5, 511, 512, 513, 1024, 3000):
        rows = torch.randint(0, 4, (9, vocab), generator=torch.Generator().manual_seed(vocab))
        values, ids = row_max(rows.float())
        assert ids.tolist() == [int(np.argmax(row)) for row in rows.numpy()]
        assert values.tolist() == rows.amax(-1).tolist()


def test_draw_inverts_the_cumulated_weights() -> None:
    generator = torch.Generator().manual_seed(2)
    for vocab in (1, 7, 512, 513, 2500):
        weights = torch.randint(0, 5, (64, vocab), generator=generator).float()
        weights[:, vocab // 2] += 1.0  # integers: every sum is exact
        uniform = torch.rand(64, dtype=torch.float64, generator=generator)
        uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-53
        drawn = draw(weights, uniform).tolist()
        for row, u, token in zip(weights.tolist(), uniform.tolist(), drawn, strict=True):
            assert token == slow_draw(row, list(range(vocab)), u)


def test_row_sums() -> None:
    rows = torch.randint(0, 100, (5, 1300), generator=torch.Generator().manual_seed(4)).float()
    assert row_sums(rows).tolist() == rows.long().sum(-1).tolist()
