"""Engines over packed cells: exact alone and in company, and budgets in bytes."""

import pytest
import torch

from engine.build import shape_of
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVSpec
from engine.kernels.cpp import library
from tests.conftest import MakeEngine
from tests.engines import CacheTape, Model, assert_idle, greedy, prompts, run_all
from tests.kernels.invariance import assert_same_rows

LONG = prompts(8, seed=5, longest=200)[7]

SPECS = {
    "full": KVSpec(format="int8", tail_tokens=16),
    "bounded": KVSpec(format="int4", tail_tokens=16, policy=SnapKV(), budget_tokens=110, window=40),
    "bf16-tail": KVSpec(format="int2", tail_tokens=16, tail_format="bf16"),
}


@pytest.mark.parametrize("kv", SPECS.values(), ids=SPECS)
def test_packed_cells_dont_depend_on_company_or_chunks(kv: KVSpec, make_engine: MakeEngine) -> None:
    tapes = []
    for chunk, others in ((512, 0), (24, 5)):
        engine = make_engine(kv=kv, max_batched_tokens=chunk, max_num_seqs=8, kv_tokens=8192)
        tapes.append(CacheTape(engine))
        for i, prompt in enumerate(prompts(others, seed=10)):
            engine.add(prompt, greedy(20 + 5 * i))
        engine.step()
        engine.add(LONG, greedy(90), id="x")
        assert len(run_all(engine)["x"].token_ids) == 90
        assert_idle(engine)
    assert_same_rows(tapes[0].stacked("x"), tapes[1].stacked("x"))


@pytest.mark.parametrize("kv", SPECS.values(), ids=SPECS)
def test_tokens_are_those_of_the_reference_but_for_near_ties(
    kv: KVSpec, make_engine: MakeEngine
) -> None:
    if (reason := library.missing()) is not None:
        pytest.skip(reason)
    tapes, tokens = [], []
    for backends in (("cpp",), ("onednn", "reference")):
        engine = make_engine(kv=kv, max_num_seqs=8, kv_tokens=8192, backends=backends)
        tapes.append(CacheTape(engine))
        for i, prompt in enumerate((LONG, LONG[20:150], LONG[:70])):
            engine.add(prompt, greedy(90), id=str(i))
        tokens.append({k: v.token_ids for k, v in run_all(engine).items()})
    assert tokens[0].keys() == tokens[1].keys()
    for id, ours in tokens[0].items():
        pairs = zip(ours, tokens[1][id], strict=True)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(ours))
        native, truth = (tape.stacked(id)[: same + 1] for tape in tapes)
        # A number may round to the next code. Tokens that change places are a near-tie then:
        # each run chose its best, so they are within twice the gap of each other in both.
        gap = (native - truth).abs().max()
        assert gap < 0.02 * truth.abs().max(), f"{id}: apart before token {same}"


def test_eight_bits_are_near_the_oracle(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=SPECS["full"])
    tape = CacheTape(engine)
    engine.add(LONG, greedy(60), id="x")
    output = run_all(engine)["x"]
    truth = tiny_model.logits([*LONG, *output.token_ids])[len(LONG) - 1 : -1]
    gap = (tape.stacked("x") - truth).abs().max()
    assert 1e-5 < gap < 0.05 * truth.abs().max()


def test_preempted_packed_caches_recompute_what_they_had(make_engine: MakeEngine) -> None:
    roomy = make_engine(kv=SPECS["full"])
    tight = make_engine(kv=SPECS["full"], kv_tokens=32, max_num_seqs=4)
    asked = [LONG[:100], LONG[50:140], LONG[90:170]]
    outputs = []
    for engine in (roomy, tight):
        for i, prompt in enumerate(asked):
            engine.add(prompt, greedy(230), id=str(i))
        outputs.append({k: v.token_ids for k, v in run_all(engine).items()})
    assert tight.stats().scheduler.preemptions > 0
    assert outputs[0] == outputs[1]


def test_fewer_bits_are_more_cells_of_the_same_bytes(tiny_model: Model) -> None:
    shape, cells = shape_of(tiny_model.config), []
    heads, dim = shape.layers * shape.kv_heads, shape.head_dim
    for name in ("bf16", "int8", "int4", "int2"):
        spec = KVSpec(
            format=name,
            tail_tokens=32,
            tail_format="bf16",
            policy=SnapKV(),
            budget_bytes=heads * 200 * (2 * dim * 2 + 4),
        ).sized(shape, torch.float32)
        assert spec.budget_tokens is not None
        cells.append(spec.budget_tokens)
    assert cells[0] == 200
    assert cells == sorted(cells)
    # at 4 bits: 16 bytes of codes, 1 + 4 of grids and 4 of a position, at 16 dimensions
    assert cells[2] == 32 + int(168 * (64 + 4) / (16 + 1 + 4 + 4))
    with pytest.raises(ValueError, match="holds 1 cells of each of 4 heads in bf16 cells"):
        KVSpec(format="bf16", policy=SnapKV(), budget_bytes=heads * 70).sized(shape, torch.float32)


def test_a_request_in_bytes_is_served_in_bytes(make_engine: MakeEngine) -> None:
    budget = 4 * 5000
    spec = KVSpec(format="int4", tail_tokens=16, policy=SnapKV(), budget_bytes=budget, window=32)
    engine = make_engine(kv=spec)
    engine.add(LONG, greedy(60))
    run_all(engine)
    kv = engine.models["main"].spec.kv
    assert kv.budget_tokens is not None
    assert engine.stats().kv["main"].evicted_cells > 0
