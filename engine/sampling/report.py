"""Logprobs and entropies of the raw distribution, every number finite.

What goes to the host is float64 columns, in which ids and float32 values are exact.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
from torch import Tensor

from engine.request import Needs, Sequence, TokenLogprob
from engine.sampling.rowwise import row_sums, top

FLOOR = -9999.0
"""The least logprob: stands for minus infinity too."""


class Report(NamedTuple):
    """Columns of the rows that asked; none of them, none computed."""

    asked: list[int]  # the rows whose requests want logprobs
    logprobs: Tensor  # [len(asked), 1 + 2C], see logprob_columns
    needs: Tensor  # [R or 0, 1 + W]: the entropy (0 where not needed), the watched logprobs


def report(logits: Tensor, tokens: Tensor, seqs: Seq[Sequence], needs: Needs) -> Report:
    """About the raw logits [R, V] and the tokens [R] that were sampled."""
    wanted = [seq.params.logprobs for seq in seqs]
    asked = [i for i, count in enumerate(wanted) if count is not None]
    best = max((count for count in wanted if count is not None), default=0)
    rest = logits[:0]
    of_needs = rest.double()
    log_p = log_probs(rest)
    if needs.entropy or needs.watch_ids:
        log_p = log_probs(logits)
        of_needs = _needs_columns(logits, log_p, needs)
        log_p = _at(log_p, asked)
    elif asked:
        log_p = log_probs(_at(logits, asked))
    return Report(asked, logprob_columns(log_p, tokens[asked], best), of_needs)


def _at(rows: Tensor, index: list[int]) -> Tensor:
    return rows if len(index) == rows.shape[0] else rows[index]


def log_probs(logits: Tensor) -> Tensor:
    """float32 [R, V]."""
    return logits.log_softmax(-1).clamp_(min=FLOOR)


def logprob_columns(log_p: Tensor, tokens: Tensor, count: int) -> Tensor:
    """[R, 1 + 2C]: the token's logprob, then the C best logprobs, then their ids."""
    best = top(log_p, count)
    own = log_p.gather(1, tokens[:, None])
    return torch.cat((own.double(), best.values.double(), best.ids.double()), 1)


def token_logprob(token: int, columns: Seq[float], count: int) -> TokenLogprob:
    """From a row of `logprob_columns` of any C, the `count` best."""
    half = (len(columns) + 1) // 2
    best = zip(columns[half:], columns[1:half], strict=True)
    return TokenLogprob(token, columns[0], tuple((int(i), value) for i, value in best)[:count])


def _needs_columns(logits: Tensor, log_p: Tensor, needs: Needs) -> Tensor:
    if needs.entropy:
        # softmax, not exp(log_p): its rows are computed one by one
        entropy = -row_sums(logits.softmax(-1) * log_p)
    else:
        entropy = log_p.new_zeros(log_p.shape[0], dtype=torch.float64)
    watched = log_p[:, list(needs.watch_ids)]
    return torch.cat((entropy[:, None], watched.double()), 1)


def to_host(parts: Seq[Tensor]) -> list[list[list[float]]]:
    """The rows of float64 matrices, fetched from their device in one piece."""
    flat = torch.cat([part.flatten() for part in parts]).tolist()
    lists = []
    for part in parts:
        rows, width = part.shape
        lists.append([flat[i * width : (i + 1) * width] for i in range(rows)])
        flat = flat[rows * width :]
    return lists
