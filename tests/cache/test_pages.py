import numpy as np
import pytest

from engine.cache.pages import PagePool
from engine.cache.prefix import PrefixCache, chain_keys


def test_pages_come_back_when_nobody_refers_to_them() -> None:
    pool = PagePool(4)
    first, second = pool.take(2), pool.take(2)
    assert sorted([*first, *second]) == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        pool.take(1)
    pool.share(first)
    pool.drop(first)
    pool.check()
    assert pool.free == 0
    pool.drop(first)
    assert (pool.free, pool.used, pool.peak) == (2, 2, 4)
    pool.drop(second)
    pool.check()
    assert pool.free == 4


def test_kept_pages_are_idle_once_their_slots_are_gone() -> None:
    pool = PagePool(3)
    ids = pool.take(2)
    pool.keep(ids)
    assert (pool.idle, pool.used) == (0, 2)
    pool.drop(ids)
    assert (pool.idle, pool.used, pool.free) == (2, 0, 1)
    pool.share(ids[:1])
    assert pool.idle == 1
    pool.unkeep(ids)
    pool.check()
    assert (pool.idle, pool.used, pool.free) == (0, 1, 2)


def test_a_key_stands_for_its_tokens_and_all_before() -> None:
    keys = chain_keys(range(40))
    assert len(keys) == 2  # the last 8 tokens fill no page
    assert chain_keys(range(32)) == keys
    assert chain_keys([1, *range(1, 32)])[1] != keys[1]
    assert chain_keys(range(15)) == []


def test_the_longest_unused_ends_of_chains_go_first() -> None:
    pool = PagePool(6)
    prefix = PrefixCache(pool)
    long, short = chain_keys(range(48)), chain_keys(range(100, 116))
    pages = prefix.take(4)
    prefix.insert(long, pages[None, :3])
    prefix.insert(short, pages[None, 3:])
    pool.drop(pages)
    prefix.touch(long[:1])
    held = prefix.take(3)  # 2 were free: the end of the long chain goes
    assert len(prefix.match(long)) == 2
    held = np.append(held, prefix.take(2))
    assert (len(prefix.match(long)), len(prefix.match(short))) == (1, 0)
    prefix.check()
    pool.drop(held)
    pool.check()


def test_pages_in_use_are_not_evicted() -> None:
    pool = PagePool(3)
    prefix = PrefixCache(pool)
    used, idle = prefix.take(1), prefix.take(1)
    prefix.insert(chain_keys(range(16)), used[None])
    prefix.insert(chain_keys(range(1, 17)), idle[None])
    pool.drop(idle)
    prefix.take(2)
    assert prefix.match(chain_keys(range(16)))
    assert not prefix.match(chain_keys(range(1, 17)))
    pool.check()
