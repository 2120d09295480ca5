"""A prefix hit gives what a miss gives, and covers no more than it may."""

import pytest
import torch

from engine.cache.paged import PagedCache
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from tests.cache.harness import SHAPE, catch_up, make_cache, make_seq

HEADS = SHAPE.layers * SHAPE.kv_heads


def after_a_first(spec: KVSpec | None = None, prompt: int = 50, pages: int = 64) -> PagedCache:
    """A cache through which one prompt went."""
    cache = make_cache(spec, pages=pages)
    seq = make_seq(range(prompt))
    admitted = cache.admit(seq)
    assert admitted is not None
    catch_up(cache, seq, admitted.slot)
    cache.release(admitted.slot)
    cache.check()
    return cache


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec(),
        KVSpec(policy=SnapKV(), budget_tokens=16, window=8),
        KVSpec(policy=SinksRecent(), budget_tokens=24, window=16),
    ],
    ids=repr,
)
def test_a_hit_gives_what_a_miss_gives(spec: KVSpec) -> None:
    seq = make_seq([*range(40), *range(60, 80)], 50)
    cold = make_cache(spec)
    missed = cold.admit(seq)
    assert missed is not None
    assert missed.computed == 0
    expected = catch_up(cold, seq, missed.slot)
    warm = after_a_first(spec)
    hit = warm.admit(seq)
    assert hit is not None
    assert hit.computed == 32
    out = catch_up(warm, seq, hit.slot)
    torch.testing.assert_close(out, expected[:, 32:], atol=1e-6, rtol=1e-6)
    for layer in range(SHAPE.layers):
        for mine, other in zip(
            warm.positions(hit.slot, layer), cold.positions(missed.slot, layer), strict=True
        ):
            assert mine.tolist() == other.tolist()
    warm.check()


@pytest.mark.parametrize(
    ("spec", "prompt", "computed"),
    [
        (KVSpec(), 50, 48),
        (KVSpec(), 48, 32),  # the last token is always computed
        (KVSpec(), 16, 0),
        # its queries are needed
        (KVSpec(policy=SnapKV(queries=8), budget_tokens=16, window=8), 50, 32),
        (KVSpec(policy=SnapKV(queries=2), budget_tokens=16, window=8), 50, 48),
        (KVSpec(policy=SnapKV(queries=8), budget_tokens=60, window=8), 50, 48),
        # streams: compacted at 40, and at 32
        (KVSpec(policy=SinksRecent(), budget_tokens=24, window=16), 50, 32),
        (KVSpec(policy=SinksRecent(), budget_tokens=16, window=16), 50, 16),
    ],
)
def test_how_far_a_hit_goes(spec: KVSpec, prompt: int, computed: int) -> None:
    cache = after_a_first(spec, prompt)
    admitted = cache.admit(make_seq(range(prompt)))
    assert admitted is not None
    assert admitted.computed == computed
    cache.check()


def test_prompt_logprobs_need_every_token() -> None:
    admitted = after_a_first().admit(make_seq(range(50), prompt_logprobs=0))
    assert admitted is not None
    assert admitted.computed == 0


def test_two_prompts_share_what_is_equal() -> None:
    cache = make_cache()
    slots = []
    for tail in (60, 80):
        seq = make_seq([*range(40), tail, tail + 1])
        admitted = cache.admit(seq)
        assert admitted is not None
        slots.append(admitted.slot)
        catch_up(cache, seq, admitted.slot)
    assert cache.stats().used_pages == HEADS * (2 + 1 + 1)
    cache.release(slots[0])
    cache.check()
    assert cache.stats().prefix_pages == 0, "the second still has them"
    cache.release(slots[1])
    stats = cache.stats()
    assert (stats.used_pages, stats.prefix_pages) == (0, HEADS * 2)


def test_kept_pages_make_way() -> None:
    cache = after_a_first(pages=HEADS * 4)
    assert cache.stats().prefix_pages == HEADS * 3
    seq = make_seq(range(60, 115))
    admitted = cache.admit(seq)
    assert admitted is not None
    catch_up(cache, seq, admitted.slot)
    cache.check()
    assert cache.stats().prefix_pages == 0
