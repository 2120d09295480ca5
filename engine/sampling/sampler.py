"""From logits to tokens, and to what is asked about them.

Each row is sampled by its own sequence's settings, rules and noise. The one invariant: a row's
result is the same, bit for bit, whoever shares the batch. The
device is read once, at the end, and once more where rows are filtered or ask for the best tokens'
logprobs: whether their short list is enough depends on its values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.noise import uniforms
from engine.request import Needs, Row, RowOutput, SamplingParams, Sequence, TokenLogprob
from engine.sampling.adjust import adjusted
from engine.sampling.filters import Filters, draw_filtered
from engine.sampling.report import (
    FLOOR,
    log_probs,
    logprob_columns,
    report,
    to_host,
    token_logprob,
)
from engine.sampling.rowwise import draw, row_max

_COLDEST = 1e-30
"""Divides any float32 difference to 0 or -inf, where a smaller temperature could round to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """A model's own settings, used where a request's are None; neutral if it has none."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def fill(self, params: SamplingParams) -> SamplingDefaults:
        """The request's values, with these in the gaps."""
        return SamplingDefaults(
            temperature=_given(params.temperature, self.temperature),
            top_k=max(0, self.top_k if params.top_k is None else params.top_k),
            top_p=_given(params.top_p, self.top_p),
            min_p=_given(params.min_p, self.min_p),
            repetition_penalty=_given(params.repetition_penalty, self.repetition_penalty),
        )

    @property
    def random(self) -> bool:
        return self.temperature > 0.0 and self.top_k != 1

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


class Sampler:
    """Samples for one model; keeps no state between calls."""

    def __init__(self, vocab_size: int, defaults: SamplingDefaults) -> None:
        self.vocab_size = vocab_size
        self.defaults = defaults

    def sample(self, logits: Tensor, rows: Seq[Row], needs: Needs) -> list[RowOutput]:
        """One output for each row of float32 logits [R, V], which belong to `rows` in order.

        A row from which nothing can be sampled (every token is forbidden, its logits aren't
        numbers, or a rule failed) has an `error` in its output instead of a token; the others
        don't notice.
        """
        if not rows:
            return []
        assert logits.shape == (len(rows), self.vocab_size)
        seqs = [row.seq for row in rows]
        settings = [self.defaults.fill(seq.params) for seq in seqs]
        final, errors = adjusted(logits, seqs, [s.repetition_penalty for s in settings])
        best, tokens = row_max(final)
        for filtered in (False, True):
            chosen = [i for i, s in enumerate(settings) if s.random and s.filters == filtered]
            if chosen:
                own = [settings[i] for i in chosen]
                uniform = _noise([seqs[i] for i in chosen], logits.device)
                index = torch.tensor(chosen, device=logits.device)
                probs = _probs(final, best, own, index)
                tokens[index] = _draw(probs, own, uniform)
        outputs = _outputs(logits, best, tokens, seqs, needs)
        return [RowOutput(error=errors[i]) if i in errors else o for i, o in enumerate(outputs)]

    def score(self, logits: Tensor, targets: Seq[int], top: int) -> list[TokenLogprob]:
        """The logprob of each row's given token and the `top` best; logits [R, V], R targets."""
        if not targets:
            return []
        tokens = torch.tensor(targets, device=logits.device)
        columns = logprob_columns(log_probs(logits), tokens, top).nan_to_num_(nan=FLOOR)
        rows = columns.tolist()
        return [token_logprob(t, row, top) for t, row in zip(targets, rows, strict=True)]


def _noise(seqs: Seq[Sequence], device: torch.device) -> Tensor:
    keys = [(seq.seed, seq.lineage, len(seq.tokens)) for seq in seqs]
    return torch.from_numpy(uniforms(keys)).to(device)  # [R] float64


def _probs(final: Tensor, best: Tensor, settings: Seq[SamplingDefaults], index: Tensor) -> Tensor:
    """The distribution after temperature of the rows at `index`, [R, V]."""
    rows = final if len(index) == final.shape[0] else final[index]
    colds = [max(s.temperature, _COLDEST) for s in settings]
    temperature = torch.tensor(colds, dtype=final.dtype, device=final.device)
    # the greatest is taken off first, so that no division overflows
    return (rows - best[index, None]).div_(temperature[:, None]).softmax(-1)


def _draw(probs: Tensor, settings: Seq[SamplingDefaults], uniform: Tensor) -> Tensor:
    """Rows that all have filters, or all have none."""
    if not settings[0].filters:
        return draw(probs, uniform)
    vocab, device = probs.shape[1], probs.device
    return draw_filtered(
        probs,
        Filters(
            torch.tensor([min(s.top_k or vocab, vocab) for s in settings], device=device),
            torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=device),
            torch.tensor([s.min_p for s in settings], dtype=torch.float64, device=device),
        ),
        uniform,
    )


def _outputs(
    logits: Tensor, best: Tensor, tokens: Tensor, seqs: Seq[Sequence], needs: Needs
) -> list[RowOutput]:
    """Everything that was asked, read from the device at once."""
    chosen = torch.stack((best.double(), tokens.double()), 1)
    if needs == Needs() and all(seq.params.logprobs is None for seq in seqs):
        return [_output(seq, *row) for seq, row in zip(seqs, chosen.tolist(), strict=True)]
    asked, of_tokens, of_needs = report(logits, tokens, seqs, needs)
    drawn, logprobs, extras = to_host((chosen, of_tokens, of_needs))
    by_row = dict(zip(asked, logprobs, strict=True))
    outputs = []
    for i, seq in enumerate(seqs):
        output = _output(seq, *drawn[i])
        if output.token is not None:
            count = seq.params.logprobs
            output = output._replace(
                logprob=None if count is None else token_logprob(output.token, by_row[i], count),
                entropy=extras[i][0] if needs.entropy else None,
                watch=tuple(extras[i][1:]) if needs.watch_ids else (),
            )
        outputs.append(output)
    return outputs


def _output(seq: Sequence, greatest: float, token: float) -> RowOutput:
    if not math.isfinite(greatest):
        return RowOutput(error=_error(seq, greatest))
    return RowOutput(token=int(token))


def _error(seq: Sequence, greatest: float) -> str:
    if greatest == -math.inf:
        return (
            f"sequence {seq.id}: no token may follow position {len(seq.tokens) - 1}: "
            "allowed_token_ids, logit_bias and the rules forbid every one"
        )
    return f"sequence {seq.id}: the model's logits are not finite ({greatest})"
