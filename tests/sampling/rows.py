"""Rows to sample from, made in one line."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from engine.request import LogitsRule, Mask, Needs, Row, RowOutput, SamplingParams, Sequence
from engine.sampling.sampler import Sampler, SamplingDefaults

NOTHING = Needs()


class Fixed:
    """A rule that always says the same."""

    def __init__(self, mask: Mask | None) -> None:
        self._mask = mask

    def mask(self, tokens: Seq[int]) -> Mask | None:
        return self._mask

    def fork(self) -> LogitsRule:
        return self

    def rewind(self, pos: int) -> None:
        pass


def row(
    tokens: Seq[int] = (0,),
    *,
    prompt_len: int = 1,
    seed: int = 0,
    lineage: int = 0,
    masks: Seq[Mask | None] = (),
    name: str = "s",
    **params: Any,
) -> Row:
    """A row that samples after `tokens`; other keywords are SamplingParams'."""
    seq = Sequence(
        id=name,
        prompt_len=prompt_len,
        tokens=list(tokens),
        params=SamplingParams(**params),
        seed=seed,
        lineage=lineage,
        rules=tuple(Fixed(mask) for mask in masks),
    )
    return Row(seq, 0, len(seq.tokens))


def sample(
    logits: Tensor,
    rows: Seq[Row],
    needs: Needs = NOTHING,
    defaults: SamplingDefaults = SamplingDefaults(),  # noqa: B008 (frozen)
) -> list[RowOutput]:
    """All rows of `logits` [R, V], or one row of it repeated."""
    logits = logits if logits.shape[0] == len(rows) else logits.expand(len(rows), -1).contiguous()
    return Sampler(logits.shape[1], defaults).sample(logits, rows, needs)


def tokens(outputs: Seq[RowOutput]) -> list[int]:
    assert all(out.token is not None for out in outputs)
    return [out.token for out in outputs if out.token is not None]


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
