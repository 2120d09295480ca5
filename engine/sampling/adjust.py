"""What changes logits before temperature: bans and biases first, then penalties.

Only rows that ask for something are touched, each alone. The cost of penalties is one conversion
of the sequence's token list a step (about 30 ns a token).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import Mask, SamplingParams, Sequence

log = logging.getLogger(__name__)


class Adjusted(NamedTuple):
    """Logits [R, V], and the errors of rows whose rules failed: rules are foreign code."""

    logits: Tensor
    errors: dict[int, str]


def adjusted(logits: Tensor, seqs: Seq[Sequence], repetition: Seq[float]) -> Adjusted:
    """After masks and penalties; `logits` itself if nothing is to be done.

    `repetition` holds the rows' repetition penalties, model's defaults filled in.
    """
    errors: dict[int, str] = {}
    changed = logits
    for i, seq in enumerate(seqs):
        try:
            masks = _masks(seq)
            if not masks and repetition[i] == 1.0 and not _penalises_output(seq.params):
                continue
            if changed is logits:
                changed = logits.clone()
            for mask in masks:
                _apply_mask(changed[i], mask)
        except Exception as error:
            log.exception("request %s: its logits rules failed", seq.id)
            errors[i] = f"its logits rules failed: {type(error).__name__}: {error}"
            continue
        _penalise(changed[i], seq, repetition[i])
    return Adjusted(changed, errors)


def _masks(seq: Sequence) -> list[Mask]:
    """The request's own, then those of its rules."""
    params = seq.params
    own = []
    if params.allowed_token_ids is not None or params.logit_bias:
        own.append(Mask(allow=params.allowed_token_ids, bias=params.logit_bias))
    ruled = (rule.mask(seq.tokens) for rule in seq.rules)
    return own + [mask for mask in ruled if mask is not None]


def _penalises_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _array(tokens: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, dtype=np.int64, count=len(tokens))


def _ids(tokens: Collection[int], row: Tensor) -> Tensor:
    ids = _array(tokens)
    if ids.size and not 0 <= ids.min() <= ids.max() < len(row):  # a GPU wouldn't survive it
        raise ValueError(f"a token id outside the vocabulary (0 to {len(row) - 1})")
    return torch.from_numpy(ids).to(row.device)


def _apply_mask(row: Tensor, mask: Mask) -> None:
    """In place on one row [V]. Several masks that allow are met together: their intersection."""
    if mask.allow is not None:
        allowed = _ids(mask.allow, row)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
    if mask.allow_bits is not None:
        bits = np.frombuffer(mask.allow_bits, dtype=np.uint8)
        forbidden = np.unpackbits(bits, bitorder="little", count=len(row)) == 0
        row.masked_fill_(torch.from_numpy(forbidden).to(row.device), -torch.inf)
    if mask.bias:
        weights = torch.tensor(list(mask.bias.values()), dtype=row.dtype, device=row.device)
        row[_ids(mask.bias, row)] += weights
    if mask.ban:
        row[_ids(mask.ban, row)] = -torch.inf


def _penalise(row: Tensor, seq: Sequence, repetition: float) -> None:
    """In place on one row [V]."""
    if repetition != 1.0:
        seen = _ids(seq.tokens, row)  # repeats write the same value again
        values = row[seen]
        row[seen] = torch.where(values > 0, values / repetition, values * repetition)
    if _penalises_output(seq.params) and seq.output_len > 0:
        found, times = np.unique(_array(seq.tokens[seq.prompt_len :]), return_counts=True)
        cost = seq.params.presence_penalty + seq.params.frequency_penalty * times
        row[torch.from_numpy(found).to(row.device)] -= torch.from_numpy(cost).to(row)
