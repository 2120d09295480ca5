"""A mask of bits allows what the same mask of ids does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Mask
from engine.sampling.adjust import _apply_mask


def bits_of(ids: set[int], size: int) -> bytes:
    number = sum(1 << i for i in ids)
    return number.to_bytes(size, "little")


@given(st.sets(st.integers(0, 39)), st.integers(5, 8), st.integers(1, 40))
def test_bits_are_ids(ids: set[int], size: int, vocab: int) -> None:
    """Bits behind the row's end mean nothing; ids behind the bits' end are forbidden."""
    logits = torch.randn(vocab)
    row = logits.clone()
    _apply_mask(row, Mask(allow_bits=bits_of(ids, size)))
    kept = torch.tensor([i in ids for i in range(vocab)])
    assert torch.equal(row, torch.where(kept, logits, -torch.inf))


@pytest.mark.parametrize("vocab", [8, 50])
def test_short_bits_and_other_parts(vocab: int) -> None:
    row = torch.zeros(vocab)
    _apply_mask(row, Mask(allow_bits=b"\x0f", ban=(1,), bias={2: 1.5}))
    expected = torch.full((vocab,), -torch.inf)
    expected[[0, 2, 3]] = torch.tensor([0.0, 1.5, 0.0])
    assert torch.equal(row, expected)
