"""Prompts' full, uncompacted pages, kept by what they hold until pages are wanted.

One entry is 16 tokens of a prompt: the pages of every layer and head. Its key hashes those tokens
and all before them, so equal keys mean equal cells. The entries are in order of last use; an
entry's prefix was used no earlier than itself, so the oldest are always chains' ends.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from engine.cache.pages import PAGE, Ints, PagePool


def chain_keys(tokens: Sequence[int]) -> list[bytes]:
    """A key for every full page of the tokens."""
    ids = np.asarray(tokens[: len(tokens) // PAGE * PAGE], dtype=np.int64).reshape(-1, PAGE)
    keys, last = [], b""
    for group in ids:
        last = hashlib.blake2b(last + group.tobytes(), digest_size=16).digest()
        keys.append(last)
    return keys


class PrefixCache:
    """The pool's pages that outlive their slots. It's also who hands out pages: it may evict."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._entries: OrderedDict[bytes, Ints] = OrderedDict()  # pages [layers * heads]

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, keys: Iterable[bytes]) -> list[Ints]:
        """Pages of the longest run of known keys from the first."""
        run = []
        for key in keys:
            pages = self._entries.get(key)
            if pages is None:
                break
            run.append(pages)
        return run

    def touch(self, keys: Sequence[bytes]) -> None:
        """These known keys, a chain from its start, were used just now."""
        for key in reversed(keys):
            self._entries.move_to_end(key)

    def insert(self, keys: Sequence[bytes], pages: Ints) -> None:
        """A chain from its start, all of it computed, in pages [L * H, at least len(keys)]. Known
        keys keep the pages that they have."""
        for column, key in enumerate(keys):
            if key not in self._entries:
                ids = pages[:, column].copy()
                self._pool.keep(ids)
                self._entries[key] = ids
        self.touch(keys)

    def take(self, count: int) -> Ints:
        """Pages from the pool, [count], evicting the longest unused entries if it has too few."""
        if count > self._pool.free:
            self._evict(count)
        return self._pool.take(count)

    def _evict(self, count: int) -> None:
        idle: list[bytes] = []
        busy: list[bytes] = []
        short = count - self._pool.free
        for key, pages in self._entries.items():
            if short <= 0:
                break
            freed = int(np.count_nonzero(self._pool.refs[pages] == 1))
            (idle if freed else busy).append(key)
            short -= freed
        for key in idle:
            self._pool.unkeep(self._entries.pop(key))
        for key in busy:  # in use, so used just now; and not met again by the next eviction
            self._entries.move_to_end(key)

    def check(self) -> None:
        """Exactly the entries' pages are kept, each by one entry."""
        ids = [p for pages in self._entries.values() for p in pages.tolist()]
        assert len(ids) == len(set(ids)), "a page in two entries"
        assert set(ids) == set(np.flatnonzero(self._pool.kept).tolist()), "kept pages"
