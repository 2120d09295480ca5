"""Executor: one model, its cache and its sampler; `run(batch)` is one forward pass.

It knows nothing of requests beyond a batch's rows, and keeps no state of its own but how long its
steps take: what a sequence has is in its cache slot.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache.paged import PagedCache
from engine.model.decoder import Decoder, StepContext
from engine.request import Batch, Role, Row, RowOutput, StepOutput, TokenLogprob
from engine.sampling.sampler import Sampler

_SHARE = 0.5
"""What compactions may take of a step's usual time before those that are left wait for the next:
others are held up by no more."""

_USUAL = 15
"""Steps whose median is the usual time."""

_SCORED_AT_ONCE = 64
"""Rows of given tokens whose logits are held at a time: 64 x 152k floats are 39 MB."""


class Executor:
    """Runs one role's batches."""

    def __init__(
        self,
        role: Role,
        decoder: Decoder,
        cache: PagedCache,
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self.role = role
        self.decoder = decoder
        self.cache = cache
        self.sampler = sampler
        self._device = device
        self._lately: deque[float] = deque(maxlen=_USUAL)  # seconds of the last steps

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """Append the rows' cells, sample where a row reaches its sequence's end."""
        start = time.perf_counter()
        rows = batch.rows
        hidden = self._forward(rows)  # [T, E]
        spots = _spots(rows)
        sampled = self._sample(batch, hidden, spots.sampling)
        given = self._score(rows, hidden, spots.given)
        outputs = []
        for i, row in enumerate(rows):
            out = sampled[i] if row.samples else RowOutput()
            out = out._replace(error=self.cache.failure(row.seq.slots[self.role]) or out.error)
            outputs.append(out._replace(given=tuple(given[i])) if row.given is not None else out)
        self._lately.append(time.perf_counter() - start)
        return StepOutput(tuple(outputs))

    def compress(self, batch: Batch) -> None:
        """Compact slots whose policy says that it's time, the batch's and those that wait, as far
        as it doesn't hold up others."""
        slots = [row.seq.slots[self.role] for row in batch.rows if self.role in row.seq.slots]
        with torch.inference_mode():
            self.cache.compress(slots, _SHARE * statistics.median(self._lately))

    def _forward(self, rows: Seq[Row]) -> Tensor:
        ids = list(chain.from_iterable(r.seq.tokens[r.start : r.start + r.count] for r in rows))
        positions = list(chain.from_iterable(range(r.start, r.start + r.count) for r in rows))
        kv = self.cache.plan([(r.seq.slots[self.role], r.start, r.count) for r in rows])
        hidden = self.decoder.forward(
            torch.tensor(ids, device=self._device),
            StepContext(torch.tensor(positions), kv),
        )
        kv.finish()
        return hidden

    def _sample(self, batch: Batch, hidden: Tensor, spots: list[int]) -> dict[int, RowOutput]:
        if not spots:
            return {}
        logits = self.decoder.logits(hidden[torch.tensor(spots, device=self._device)])
        which = [i for i, row in enumerate(batch.rows) if row.samples]
        outs = self.sampler.sample(logits, [batch.rows[i] for i in which], batch.needs)
        return dict(zip(which, outs, strict=True))

    def _score(
        self, rows: Seq[Row], hidden: Tensor, spots: list[_Given]
    ) -> dict[int, list[TokenLogprob]]:
        scores: dict[int, list[TokenLogprob]] = {i: [] for i in range(len(rows))}
        for at in range(0, len(spots), _SCORED_AT_ONCE):
            part = spots[at : at + _SCORED_AT_ONCE]
            logits = self.decoder.logits(
                hidden[torch.tensor([s.spot for s in part], device=self._device)]
            )
            top = max(s.top for s in part)
            for s, logprob in zip(
                part, self.sampler.score(logits, [s.target for s in part], top), strict=True
            ):
                scores[s.row].append(logprob._replace(top=logprob.top[: s.top]))
        return scores


class _Given(NamedTuple):
    """hidden[spot] predicts the known token `target` of row `row`."""

    row: int
    spot: int
    target: int
    top: int


class _Spots(NamedTuple):
    sampling: list[int]
    given: list[_Given]


def _spots(rows: Seq[Row]) -> _Spots:
    """Which of the step's hidden states go through the LM head."""
    sampling: list[int] = []
    given: list[_Given] = []
    base = 0
    for i, row in enumerate(rows):
        end = row.start + row.count
        if row.given is not None:
            known = row.seq.tokens[row.start + 1 : end + 1]
            given += (_Given(i, base + j, token, row.given) for j, token in enumerate(known))
        if row.samples:
            sampling.append(base + row.count - 1)
        base += row.count
    return _Spots(sampling, given)
