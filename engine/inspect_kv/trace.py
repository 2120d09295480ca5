"""One request, and which cells each (layer, head) still held after every compaction.

The cache is read between steps, so a run that isn't traced pays nothing. Cells only ever go at
compactions, and every token appends one to every head: a whole history is therefore one number a
cell, the compaction that removed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.cache.paged import PagedCache
from engine.cache.pages import PAGE
from engine.cache.policy import KVSpec
from engine.cache.tables import pages_for
from engine.cache.view import KVShape
from engine.engine import Engine
from engine.output import Output
from engine.prompt import Prompt
from engine.request import MAIN, SamplingParams, Sequence

MOST_CELLS = 2**24
"""Tokens x layers x kv heads of a trace: what a page of some 20 MB holds."""

Array = NDArray[np.int32]

Frame = tuple[int, list[list[Array]]]
"""A compaction: tokens that had cells then, and the positions that each (layer, head) kept."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a run's cache kept. T tokens have cells (the last one sampled never gets any), and C
    compactions happened.

    `removed` is the compaction, counted from 0, that removed a token's cell, C where it was held to
    the end. `texts` are the tokens one by one; bytes that are no UTF-8 by themselves are escaped.
    """

    model: str
    kv: KVSpec
    shape: KVShape
    layer_budgets: list[int] | None  # cells a head; None: the full cache
    page_bytes: int  # keys, values and positions of one page
    side_bytes: int  # the most that was in use beside them: tables, queries, biases
    prompt_len: int
    token_ids: list[int]  # [T + 1]
    texts: list[str]
    thoughts: list[tuple[int, int]]  # positions [start, end) behind the prompt
    compactions: list[int]  # [C] tokens that had cells at each
    removed: Array  # [L, H, T]
    output: Output

    def held(self, after: int) -> Array:
        """Cells of each head after a compaction; `after` C: at the end. [L, H]"""
        count = len(self.compactions)
        tokens = [*self.compactions, self.removed.shape[-1]][after]
        # what is left at the end is what the last compaction left, and the tokens since
        return (self.removed[..., :tokens] > min(after, count - 1)).sum(-1, dtype=np.int32)

    @cached_property
    def cell_bytes(self) -> list[int]:
        """Bytes of the pages that the cells are in when so many tokens have some: [T + 1], after
        the compaction where one falls there."""
        base = np.zeros(self.removed.shape[:2], np.int32)  # [L, H]
        found, start = [], 0
        for index, end in enumerate([*self.compactions, self.removed.shape[-1] + 1]):
            cells = base[..., None] + np.arange(end - start)  # [L, H, tokens of this stretch]
            found += (pages_for(cells).sum((0, 1)) * self.page_bytes).tolist()
            if index < len(self.compactions):
                base, start = self.held(index), end
        return found

    def before(self, compaction: int) -> tuple[int, int]:
        """Cells of all heads just before a compaction, and bytes of their pages."""
        last = self.compactions[compaction - 1] if compaction else 0
        base = self.held(compaction - 1) if compaction else np.zeros(self.removed.shape[:2], int)
        cells = base + (self.compactions[compaction] - last)
        return int(cells.sum()), int(pages_for(cells).sum()) * self.page_bytes

    @property
    def full_bytes(self) -> int:
        """What the same tokens take when every cell stays."""
        layers, heads, tokens = self.removed.shape
        return layers * heads * -(-tokens // PAGE) * self.page_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that the cells' pages took, just before a compaction or at the end."""
        return max(self.cell_bytes + [self.before(i)[1] for i in range(len(self.compactions))])

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        layers, heads, tokens = self.removed.shape
        return {
            "model": self.model,
            "policy": None if self.kv.policy is None else str(self.kv.policy),
            "allocation": str(self.kv.allocation),
            "budget_tokens": self.kv.budget_tokens,
            "window": None if self.kv.policy is None else self.kv.window,
            "layers": layers,
            "kv_heads": heads,
            "layer_budgets": self.layer_budgets,
            "page_cells": PAGE,
            "page_bytes": self.page_bytes,
            "side_bytes": self.side_bytes,
            "prompt_tokens": self.prompt_len,
            "cached_tokens": tokens,
            "finish_reason": self.output.finish_reason,
            "token_ids": self.token_ids,
            "texts": self.texts,
            "thoughts": [list(span) for span in self.thoughts],
            "compactions": [
                {
                    "tokens": at,
                    "cells_before": self.before(i)[0],
                    "bytes_before": self.before(i)[1],
                    "held": self.held(i).tolist(),
                }
                for i, at in enumerate(self.compactions)
            ],
            "held_at_end": self.held(len(self.compactions)).tolist(),
            "cell_bytes": self.cell_bytes,
            "removed_by": self.removed.tolist(),
        }


def record(engine: Engine, prompt: Prompt, params: SamplingParams) -> Trace:
    """Answer one prompt on an engine that does nothing else, and watch its main cache.

    ValueError: the prompt can't be served, asks for more than one choice, or may grow past
    `MOST_CELLS`.
    """
    request = engine.prepare(prompt, params)
    if len(request.choices) > 1:
        raise ValueError(f"n must be 1 to be traced, not {len(request.choices)}")
    (seq,), cache = request.choices, engine.caches[MAIN]
    _check_size(seq, cache.shape, engine.max_model_len)
    frames: list[Frame] = []
    side_bytes, output, evicted = 0, None, cache.stats().evicted_cells
    engine.submit(request)
    while output is None:
        for delta in engine.step():
            output = delta.output or output
        stats = cache.stats()
        side_bytes = max(side_bytes, stats.used_side_bytes)
        if stats.evicted_cells > evicted and MAIN in seq.slots:
            evicted = stats.evicted_cells
            frame = _frame(cache, seq.slots[MAIN])
            # a slot that was emptied comes this way again
            frames = [*(earlier for earlier in frames if earlier[0] < frame[0]), frame]
    kv = engine.models[MAIN].spec.kv
    return Trace(
        model=engine.config.models[MAIN].model,
        kv=kv,
        shape=cache.shape,
        layer_budgets=(
            None if kv.policy is None else kv.allocation.layer_budgets(cache.shape, kv.budget)
        ),
        page_bytes=cache.stats().page_bytes,
        side_bytes=side_bytes,
        prompt_len=seq.prompt_len,
        token_ids=list(seq.tokens),
        texts=[
            engine.tokenizer.token_bytes(token).decode("utf-8", "backslashreplace")
            for token in seq.tokens
        ],
        thoughts=_spans(seq),
        compactions=[at for at, _ in frames],
        removed=_removed(frames, cache.shape, len(seq.tokens) - 1),
        output=output,
    )


def _check_size(seq: Sequence, shape: KVShape, max_model_len: int) -> None:
    most = max_model_len
    if seq.params.max_tokens is not None:
        most = min(most, seq.prompt_len + seq.params.max_tokens)
    heads = shape.layers * shape.kv_heads
    if most * heads > MOST_CELLS:
        raise ValueError(
            f"a trace holds at most {MOST_CELLS // heads} tokens of {heads} kv heads; the prompt"
            f" has {seq.prompt_len} and max_tokens is {seq.params.max_tokens}"
        )


def _frame(cache: PagedCache, slot: int) -> Frame:
    layers = range(cache.shape.layers)
    return cache.computed(slot), [cache.positions(slot, layer) for layer in layers]


def _removed(frames: list[Frame], shape: KVShape, tokens: int) -> Array:
    """From what each compaction left: [L, H, T]."""
    removed = np.empty((shape.layers, shape.kv_heads, tokens), np.int32)
    start = 0
    for index, (at, layers) in enumerate(frames):
        removed[..., start:at] = index
        start = at
        for layer, heads in enumerate(layers):
            for head, positions in enumerate(heads):
                removed[layer, head, positions] = index + 1
    removed[..., start:] = len(frames)
    return removed


def _spans(seq: Sequence) -> list[tuple[int, int]]:
    """From the prompt's end on; what follows the last boundary is the last thought."""
    bounds = [seq.prompt_len, *seq.thought_ends]
    if bounds[-1] < len(seq.tokens):
        bounds.append(len(seq.tokens))
    return list(pairwise(bounds))
