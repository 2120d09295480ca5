"""What changes logits before temperature: bans and biases first, then penalties.

Only rows that ask for something are touched, each alone. The cost of penalties is one conversion
of the sequence's token list a step (about 30 ns a token).
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as Seq

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.request import Mask, SamplingParams, Sequence

log = logging.getLogger(__name__)


def adjusted(logits: Tensor, seqs: Seq[Sequence], repetition: Seq[float]) -> Tensor:
    """Logits [R, V] after masks and penalties; `logits` itself if nothing is to be done.

    `repetition` holds the rows' repetition penalties, model's defaults filled in.
    """
    masks = [_masks(seq) for seq in seqs]
    changed = [
        i
        for i, seq in enumerate(seqs)
        if masks[i] or repetition[i] != 1.0 or _penalises_output(seq.params)
    ]
    if not changed:
        return logits
    logits = logits.clone()
    for i in changed:
        for mask in masks[i]:
            _apply_mask(logits[i], mask)
        _penalise(logits[i], seqs[i], repetition[i])
    return logits


def _masks(seq: Sequence) -> list[Mask]:
    """The request's own, then those of its rules."""
    params = seq.params
    own = []
    if params.allowed_token_ids is not None or params.logit_bias:
        own.append(Mask(allow=params.allowed_token_ids, bias=params.logit_bias))
    try:
        ruled = [rule.mask(seq.tokens) for rule in seq.rules]
    except Exception:  # one request's rule: the rows beside it go on
        log.exception("sequence %s: a logits rule failed", seq.id)
        return [Mask(allow=())]
    return own + [mask for mask in ruled if mask is not None]


def _penalises_output(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _array(tokens: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(tokens, dtype=np.int64, count=len(tokens))


def _ids(tokens: Collection[int], row: Tensor) -> Tensor:
    return torch.from_numpy(_array(tokens)).to(row.device)


def _apply_mask(row: Tensor, mask: Mask) -> None:
    """In place on one row [V]. Several masks that allow are met together: their intersection."""
    if mask.allow is not None:
        allowed = _ids(mask.allow, row)
        kept = row[allowed]
        row.fill_(-torch.inf)
        row[allowed] = kept
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
