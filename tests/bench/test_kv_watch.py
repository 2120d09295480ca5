"""What a sequence's cache held, beside what a tape of every step says of it."""

import pytest
import torch

from bench.evaluation.backend import Ask, Sampling
from bench.evaluation.engine_backend import EngineBackend
from bench.evaluation.kv_watch import Promise
from bench.evaluation.records import Generation
from engine.cache.allocations.adakv import AdaKV
from engine.cache.policies.kara import Kara
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tam import TAM
from engine.cache.policy import KVSpec
from engine.request import MAIN
from tests.conftest import MakeEngine
from tests.engines import CacheTape

SPECS = {
    "full": KVSpec(),
    "snapkv": KVSpec(policy=SnapKV(), budget_tokens=24, window=12),
    "adakv": KVSpec(policy=SnapKV(), allocation=AdaKV(), budget_tokens=24, window=12),
    "kara": KVSpec(policy=Kara(recent=4), budget_tokens=5, window=12),
    "tam": KVSpec(policy=TAM(queries=8, tail=4), budget_tokens=24, window=12),
    "int4": KVSpec(format="int4", tail_tokens=16, policy=SnapKV(), budget_tokens=100, window=24),
}


def asks(count: int, length: int = 150) -> list[Ask]:
    return [
        Ask(
            key=("sums", f"p{i}", 0),
            messages=[{"role": "user", "content": "how many? " * (1 + 2 * i)}],
            params=Sampling(max_tokens=length - 7 * i, temperature=1.0, seed=i),
        )
        for i in range(count)
    ]


def run(backend: EngineBackend, count: int = 6) -> list[Generation]:
    made = sorted(backend.run(asks(count)), key=lambda pair: pair[0].key)
    return [generation for _, generation in made]


@pytest.mark.parametrize("kv", SPECS.values(), ids=SPECS)
def test_figures_are_those_of_every_step(kv: KVSpec, make_engine: MakeEngine) -> None:
    """The tape sees the cells that each query saw: what is held while its row runs."""
    engine = make_engine(kv=kv, max_num_seqs=4, max_batched_tokens=48)
    tape = CacheTape(engine)
    for request, made in zip(tape_ids(6), run(EngineBackend(engine)), strict=True):
        held = made.kv
        assert held is not None
        cells = made.prompt_tokens + made.output_tokens - 1
        seen = tape.keeps[request][:, :, :cells, :cells].sum(-1)  # [L, H, T]
        assert held.peak_cells == int(seen.sum((0, 1)).max())
        assert held.excess_cells <= 0
        ends = torch.tensor([start + count - 1 for start, count in tape.ran[request]])
        per_step = seen.sum((0, 1))[ends].double()
        assert held.mean_cells == pytest.approx(float(per_step.mean()))
        assert held.peak_bytes >= held.mean_bytes > 0
        assert held.side_bytes > 0
        if kv == SPECS["full"]:
            assert held.excess_cells == -1  # the last token has no cell


def tape_ids(count: int) -> list[str]:
    return [f"request-{i}" for i in range(count)]


def test_one_sequences_bytes_are_the_caches(make_engine: MakeEngine) -> None:
    for name in ("full", "snapkv", "int4", "tam"):
        engine = make_engine(kv=SPECS[name], max_num_seqs=1)
        (made,) = run(EngineBackend(engine), 1)
        assert made.kv is not None
        peak = engine.stats().kv[MAIN].peak_bytes
        page = max(engine.stats().kv[MAIN].page_bytes, engine.stats().kv[MAIN].packed_page_bytes)
        assert made.kv.peak_bytes <= peak
        # pages that are taken before the cells that they are for
        assert peak - made.kv.peak_bytes <= 2 * 4 * page


def test_a_preempted_sequence_starts_anew(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_tokens=200, max_num_seqs=6)
    made = run(EngineBackend(engine))
    assert engine.stats().scheduler.preemptions > 0
    for generation in made:
        assert generation.kv is not None
        cells = generation.prompt_tokens + generation.output_tokens - 1
        assert generation.kv.peak_cells == 4 * cells
        assert generation.kv.excess_cells == -1


def test_a_promise_that_is_broken_shows(make_engine: MakeEngine) -> None:
    engine = make_engine(kv=SPECS["snapkv"])
    backend = EngineBackend(engine)
    smaller = KVSpec(policy=SnapKV(), budget_tokens=20, window=12)
    backend._promise = Promise(engine.caches[MAIN], smaller)
    made = run(backend, 1)
    assert made[0].kv is not None
    assert made[0].kv.excess_cells == 2 * 4  # of a layer's two heads
