"""The full cache: what it attends to, and where its pages go."""

import torch

from tests.cache.harness import catch_up, dense, make_cache, make_seq, step


def test_chunks_and_decode_attend_like_a_dense_cache() -> None:
    seq = make_seq(range(50))
    for chunk in (1, 7, 16, 50):
        cache = make_cache()
        admitted = cache.admit(seq)
        assert admitted is not None
        out = catch_up(cache, seq, admitted.slot, chunk)
        torch.testing.assert_close(out, dense(seq), atol=1e-5, rtol=1e-5)
        cache.check()
        cache.release(admitted.slot)
        cache.check()
        assert cache.stats().used_pages == 0


def test_mixed_rows_in_any_order() -> None:
    cache = make_cache()
    seqs = [make_seq(range(i, i + 20)) for i in (0, 30, 60)]
    slots = [cache.admit(seq).slot for seq in seqs]  # type: ignore[union-attr]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for counts in ((5, 1, 9), (1, 18, 1), (14, 1, 10)):
        rows = list(zip(seqs, slots, counts, strict=True))
        for seq, slot, count in rows:
            assert cache.reserve(seq, slot, count) == count
        for part, out in zip(parts, step(cache, rows), strict=True):
            part.append(out)
        cache.check()
    for seq, part in zip(seqs, parts, strict=True):
        torch.testing.assert_close(torch.cat(part, 1), dense(seq), atol=1e-5, rtol=1e-5)
