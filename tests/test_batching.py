"""A request's answer doesn't depend on its company: bit for bit, where the libraries give it."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import Engine, Output, SamplingParams
from tests.conftest import MakeEngine
from tests.engines import Model, Tape, run_all
from tests.kernels.invariance import assert_same_rows

PROMPT = [random.Random(5).randrange(290) for _ in range(75)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def company(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of all lengths; greedy and random, with penalties, logprobs, biases and choices."""
    rng = random.Random(9)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 7, "seed": 1},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01, "seed": 2, "n": 2},
        {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
        {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "seed": 3},
        {"temperature": 1.0, "logit_bias": {5: 3.0}, "frequency_penalty": 1.0, "seed": 4},
    ]
    return [
        (
            [rng.randrange(290) for _ in range(rng.randint(1, 120))],
            SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True, **kinds[i % len(kinds)]),
        )
        for i in range(count)
    ]


def run(engine: Engine, others: int = 0, *, after: int = 0, priority: int = 0) -> Tape:
    """PROMPT as request "x", with `others` beside it, `after` of them some steps later."""
    tape = Tape(engine)
    asked = company(others)
    for prompt, params in asked[after:]:
        engine.add(prompt, params)
    engine.add(PROMPT, PARAMS, id="x", priority=priority)
    for prompt, params in asked[:after]:
        engine.step()
        engine.add(prompt, params)
    assert len(run_all(engine)["x"].token_ids) == 40
    return tape


def same(one: Tape, other: Tape, dtype: torch.dtype = torch.float32) -> None:
    assert_same_rows(one.stacked("x"), other.stacked("x"), dtype)


@pytest.fixture
def alone(make_engine: MakeEngine) -> Tape:
    tape = run(make_engine())
    assert tape.ran["x"][:2] == [(0, 75), (75, 1)]
    return tape


def test_in_a_batch_of_32(alone: Tape, make_engine: MakeEngine) -> None:
    same(alone, run(make_engine(), 31, after=12))


def test_on_two_threads(alone: Tape, make_engine: MakeEngine) -> None:
    same(alone, run(make_engine(threads=2), 4, after=2))
    torch.set_num_threads(1)


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_with_other_chunks(chunk: int, alone: Tape, make_engine: MakeEngine) -> None:
    few = run(make_engine(max_batched_tokens=chunk, max_num_seqs=8))
    same(alone, few)
    assert max(count for _, count in few.ran["x"]) == min(chunk, 75)
    same(alone, run(make_engine(max_batched_tokens=chunk, max_num_seqs=8), 12, after=4))


def test_after_preemption(alone: Tape, make_engine: MakeEngine) -> None:
    """Cells that were dropped and computed again, in another chunk than the first time."""
    engine = make_engine(kv_tokens=192, max_batched_tokens=64, max_num_seqs=8)
    tape = run(engine, 7, after=7, priority=1)
    assert engine.stats().scheduler.preemptions > 0
    assert sum(start == 0 for start, _ in tape.ran["x"]) > 1
    same(alone, tape)


@pytest.mark.parametrize("length", [16, 40, 64, 75])
def test_with_a_prefix_hit(length: int, alone: Tape, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate([PROMPT[:length]], PARAMS)
    tape = run(engine, 5)
    assert tape.ran["x"][0][0] == min(length, 74) // 16 * 16
    same(alone, tape)


def test_in_bfloat16(make_engine: MakeEngine) -> None:
    tape = run(make_engine(dtype="bfloat16"))
    chunks = make_engine(dtype="bfloat16", max_batched_tokens=64)
    for other in (run(make_engine(dtype="bfloat16"), 31), run(chunks, 6)):
        same(tape, other, torch.bfloat16)


def test_other_shapes(make_model: Callable[..., Model], make_engine: MakeEngine) -> None:
    """Biases, norms of heads, one kv head, odd sizes, and sums so long that kernels split them."""
    for model in (
        make_model("qwen3"),
        make_model("qwen2", kv_heads=1, intermediate_size=90),
        make_model("llama", hidden_size=72, head_dim=24),
        make_model("llama", intermediate_size=1536),
    ):
        same(run(make_engine(model)), run(make_engine(model, max_batched_tokens=64), 20, after=7))


def test_seeded_sampling_in_any_order(make_engine: MakeEngine) -> None:
    """Every request of the company, in three orders of arrival and against itself alone."""
    asked = company(18)
    seen = []
    for order in (1, 2, 3):
        mixed = list(range(len(asked)))
        random.Random(order).shuffle(mixed)
        engine = make_engine(max_num_seqs=4 + 4 * order, max_batched_tokens=40 * order)
        outputs: dict[str, Output] = {}
        for i in mixed:
            engine.add(*asked[i], id=str(i))
            if i % order == 0:
                outputs |= {d.id: d.output for d in engine.step() if d.output is not None}
        outputs |= run_all(engine)
        seen.append({id: [c.token_ids for c in o.choices] for id, o in outputs.items()})
    assert seen[0] == seen[1] == seen[2]
    for i in (1, 2, 4, 5):
        (single,) = make_engine().generate([asked[i][0]], asked[i][1])
        assert [c.token_ids for c in single.choices] == seen[0][str(i)]
