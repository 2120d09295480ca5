"""Engines over tiny models, tapes of what they do, and what the oracle says of it."""

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from engine import Engine, EngineConfig, ModelSpec, Output, SamplingParams
from engine.build import RoleCache, shape_of, slots_of
from engine.cache.policy import KVSpec
from engine.model.architecture import DecoderConfig
from engine.model.checkpoint import open_checkpoint
from engine.request import MAIN, Batch, Needs, Row, RowOutput, Sequence, StepOutput
from tests import oracle, tiny

TIE = 1e-4
"""Logits nearer than this may change places by float32 rounding."""


class Model(NamedTuple):
    """A tiny model: its folder, and what the oracle needs of it."""

    folder: Path
    config: DecoderConfig  # as read from the folder
    tensors: dict[str, Tensor]

    def logits(
        self, tokens: Seq[int], keep: Tensor | None = None, refits: Seq[oracle.Refit] = ()
    ) -> Tensor:
        """The oracle's, [T, V]."""
        return oracle.logits(self.config, self.tensors, torch.tensor(tokens), keep, refits)


def write_model(folder: Path, family: str = "llama", **flags: Any) -> Model:
    config = tiny.tiny_config(family, **flags)
    tensors = tiny.tiny_tensors(config)
    tiny.write_folder(folder, config, tensors)
    return Model(folder, open_checkpoint(folder).config, tensors)


def open_engine(
    model: Model,
    *,
    kv: KVSpec | None = None,
    kv_tokens: int = 4096,
    dtype: Literal["float32", "bfloat16"] = "float32",
    **config: Any,
) -> Engine:
    """An engine whose cache holds `kv_tokens` tokens uncompressed; `config` is EngineConfig's."""
    spec = ModelSpec(str(model.folder), dtype=dtype, kv=kv or KVSpec())
    config = {"threads": 1, "max_num_seqs": 32, "max_model_len": 512} | config
    slots = slots_of(EngineConfig(models={MAIN: spec}, **config), MAIN)
    cell = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    cache = RoleCache(shape_of(model.config), spec.kv, cell, slots)
    side = cache.side_bytes(config["max_model_len"])
    tails = slots * cache.sizes.tail_bytes(config["max_model_len"])
    kv_bytes = side + tails + int(cache.token_bytes * kv_tokens) + 1
    return Engine(EngineConfig(models={MAIN: spec}, kv_bytes=kv_bytes, **config))


def greedy(max_tokens: int | None = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


def prompts(count: int, seed: int = 0, longest: int = 90) -> list[list[int]]:
    """Random ids; the first ones of 1 token, of a page less or more one, and of several chunks."""
    rng = random.Random(seed)
    sizes = [1, 2, 15, 16, 17, 33, 64, longest]
    sizes += [rng.randint(1, longest) for _ in range(count)]
    return [[rng.randrange(290) for _ in range(size)] for size in sizes[:count]]


def assert_idle(engine: Engine) -> None:
    """Nothing waits, runs or is kept for `step`, and only the prefix cache has pages."""
    engine.check()
    assert not engine.has_work()
    stats = engine.stats()
    assert stats.scheduler.running == stats.scheduler.waiting == 0
    for kv in stats.kv.values():
        assert kv.used_pages == 0
        assert kv.free_pages + kv.prefix_pages == kv.pages


def run_all(engine: Engine) -> dict[str, Output]:
    """Step until nothing is left, checking every invariant after each step."""
    outputs = {}
    while engine.has_work():
        for delta in engine.step():
            if delta.output is not None:
                outputs[delta.id] = delta.output
        engine.check()
    return outputs


def assert_greedy(model: Model, output: Output, *, tie: float = TIE) -> int:
    """The output is the oracle's greedy continuation, token for token; how many near-ties flipped.

    One dense pass: if every token is the best after those before it, all are what the oracle alone
    would have said.
    """
    prompt, tokens = output.prompt_token_ids, output.token_ids
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1]  # [N, V]
    best = logits.max(-1)
    gaps = best.values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    flips = (best.indices != torch.tensor(tokens)).nonzero()[:, 0].tolist()
    for at in flips:
        print(f"{output.id} token {at}: {tokens[at]} is {gaps[at]:.2e} below the best")
    assert gaps.max() <= tie, f"{output.id}: tokens {flips} aren't the best by {gaps[flips]}"
    return len(flips)


class Tape:
    """Records what an engine's main role does, by wrapping its executor's own methods.

    By request id (choice 0's): `logits` {position: [V], which sampled the token there}, `again`
    those of positions that were sampled before a truncation, `ran` (start, count) of every row.
    """

    def __init__(self, engine: Engine) -> None:
        self.executor = engine._executors[MAIN]
        self._run, self._sample = self.executor.run, self.executor.sampler.sample
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.again: dict[str, dict[int, Tensor]] = {}
        self.ran: dict[str, list[tuple[int, int]]] = {}
        self.executor.run = self.run  # type: ignore[method-assign]
        self.executor.sampler.sample = self.sample  # type: ignore[method-assign]

    def run(self, batch: Batch) -> StepOutput:
        for row in batch.rows:
            if row.seq.index == 0:
                self.ran.setdefault(row.seq.id, []).append((row.start, row.count))
        return self._run(batch)

    def sample(self, logits: Tensor, rows: Seq[Row], needs: Needs) -> list[RowOutput]:
        for row, values in zip(rows, logits, strict=True):
            if row.seq.index == 0:
                known = self.logits.setdefault(row.seq.id, {})
                position = len(row.seq.tokens)
                if position in known:
                    self.again.setdefault(row.seq.id, {})[position] = known[position]
                known[position] = values.clone()
        return self._sample(logits, rows, needs)

    def stacked(self, id: str) -> Tensor:
        """[N, V] in the order of positions."""
        return torch.stack([values for _, values in sorted(self.logits[id].items())])


class CacheTape(Tape):
    """Also what the cache held, as it says itself.

    `keeps` [L, H, T, T]: the cells that each query saw. `compacted`: tokens computed at each
    compaction. `held` [L, H] after the last step, `most` the largest mean over the heads. `refits`:
    the biases after each compaction, and the values of the cells that have one.
    """

    def __init__(self, engine: Engine, size: int = 512) -> None:
        super().__init__(engine)
        self._causal = torch.ones(size, size, dtype=torch.bool).tril()
        cache = self.executor.cache
        self._compress = cache.compress
        cache.compress = self.compress  # type: ignore[method-assign]
        self._known: dict[tuple[str, int], Sequence] = {}
        self.keeps: dict[str, Tensor] = {}
        self.compacted: dict[str, list[int]] = {}
        self.held: dict[str, Tensor] = {}
        self.most: dict[str, float] = {}
        self.refits: dict[str, list[oracle.Refit]] = {}

    def run(self, batch: Batch) -> StepOutput:
        for row in batch.rows:
            self._known[row.seq.id, row.seq.index] = row.seq
            self._look(row)
        return super().run(batch)

    def _look(self, row: Row) -> None:
        """The row's queries see the cells held before it, and its own up to each query's."""
        cache, end = self.executor.cache, row.start + row.count
        heads = (cache.shape.layers, cache.shape.kv_heads, 1, 1)
        keeps = self.keeps.setdefault(row.seq.id, self._causal.repeat(heads))
        own = torch.zeros_like(self._causal[: row.count])
        own[:, row.start : end] = self._causal[: row.count, : row.count]
        keeps[:, :, row.start : end] = own
        refits = self.refits.setdefault(row.seq.id, [])
        refits[:] = [refit for refit in refits if refit.start <= row.start]
        for layer in range(cache.shape.layers):
            for head, positions in enumerate(cache.positions(row.seq.slots[MAIN], layer)):
                keeps[layer, head, row.start : end, torch.from_numpy(positions).long()] = True

    def compress(self, slots: Seq[int], seconds: float | None = None) -> None:
        """A compaction that takes several calls counts once."""
        cache = self.executor.cache
        live = [seq for seq in self._known.values() if MAIN in seq.slots]
        before = [cache.held(seq.slots[MAIN]) for seq in live]
        self._compress(slots, seconds)
        for seq, cells in zip(live, before, strict=True):
            held, at = cache.held(seq.slots[MAIN]), cache.computed(seq.slots[MAIN])
            self.held[seq.id] = torch.from_numpy(held)
            self.most[seq.id] = max(self.most.get(seq.id, 0.0), float(cells.mean()))
            if held.sum() < cells.sum():
                compacted, refits = self.compacted.setdefault(seq.id, []), self.refits[seq.id]
                if compacted[-1:] == [at]:
                    compacted.pop()
                    refits[-1:] = []
                compacted.append(at)
                if cache._store.bias is not None:
                    refits.append(self._refit(seq.slots[MAIN]))

    def _refit(self, slot: int) -> oracle.Refit:
        cache = self.executor.cache
        shape, store, size = cache.shape, cache._store, len(self._causal)
        heads = (shape.layers, shape.kv_heads, size)
        bias, v = torch.zeros(heads), torch.zeros(*heads, shape.head_dim)
        assert store.bias is not None
        for layer in range(shape.layers):
            for head, positions in enumerate(cache.positions(slot, layer)):
                at, count = torch.from_numpy(positions).long(), len(positions)
                pages = torch.from_numpy(cache._tables.table[slot, layer, head]).long()
                bias[layer, head, at] = store.bias[pages].flatten()[:count]
                v[layer, head, at] = store.v[pages].flatten(0, 1)[:count].float()
        return oracle.Refit(cache.computed(slot), bias != 0, bias, v)
