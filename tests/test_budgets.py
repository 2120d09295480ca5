"""Requests that ask for their own KV budget, beside others in one batch."""

import pytest

from engine import SamplingParams
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policies.tam import TAM
from engine.cache.policy import KVSpec
from tests.conftest import MakeEngine
from tests.engines import CacheTape, Model, assert_greedy, greedy, prompts, run_all
from tests.test_eviction import assert_oracles

PROMPT = prompts(8, seed=8)[6]


@pytest.mark.parametrize("policy", [SnapKV(queries=4), TAM(queries=8)], ids=repr)
def test_each_has_the_budget_that_it_asks_for(
    policy: SnapKV | TAM, tiny_model: Model, make_engine: MakeEngine
) -> None:
    kv = KVSpec(policy=policy, budget_tokens=32, window=16, allow_full=True)
    engine = make_engine(kv=kv, max_num_seqs=8)
    tape = CacheTape(engine)
    asked = {"own": None, "small": 12, "full": "full"}
    for name, budget in asked.items():
        engine.add(PROMPT, greedy(60, kv_budget=budget), id=name)
    outputs = run_all(engine)
    assert tape.compacted["own"][0] == len(PROMPT) == tape.compacted["small"][0]
    assert "full" not in tape.compacted
    assert_greedy(tiny_model, outputs["full"])
    for name, budget in (("own", 32), ("small", 12)):
        assert_oracles(tiny_model, tape, outputs[name])
        assert int(tape.held[name].max()) <= budget + 16
    alone = make_engine(kv=KVSpec(policy=policy, budget_tokens=12, window=16))
    assert alone.generate([PROMPT], greedy(60))[0].token_ids == outputs["small"].token_ids


def test_smaller_budgets_let_more_in_and_full_ones_fewer(make_engine: MakeEngine) -> None:
    running = {}
    for budget in (None, 8, "full"):
        kv = KVSpec(policy=SinksRecent(), budget_tokens=48, window=8, allow_full=True)
        engine = make_engine(kv=kv, kv_tokens=640, max_num_seqs=32)
        for _ in range(24):
            engine.add(PROMPT[:9], greedy(120, kv_budget=budget))
        most = 0
        while engine.has_work():
            engine.step()
            engine.check()
            most = max(most, engine.stats().scheduler.running)
        running[budget] = most
        assert budget == "full" or engine.stats().scheduler.preemptions == 0
    assert running[8] == 640 // 32 > running[None] == 640 // 80


@pytest.mark.parametrize(
    ("kv", "budget", "words"),
    [
        (KVSpec(), 64, "kv_budget=64: this cache has no policy"),
        (KVSpec(policy=SnapKV(), budget_tokens=64), 65, "from 4 to this cache's 64, not 65"),
        (KVSpec(policy=SnapKV(), budget_tokens=64), 3, "from 4 to this cache's 64, not 3"),
        (KVSpec(policy=SnapKV(), budget_tokens=64), "full", 'kv_budget="full" isn\'t allowed'),
        (
            KVSpec(policy=SnapKV(recent=16), budget_tokens=64),
            16,
            "kv_budget=16: policy SnapKV.*2 sinks and 16 recent cells leave nothing",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(
    kv: KVSpec, budget: int | str, words: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(kv=kv)
    with pytest.raises(ValueError, match=words):
        engine.add(PROMPT, SamplingParams(kv_budget=budget))  # type: ignore[arg-type]


def test_a_full_cache_is_full_anyway(make_engine: MakeEngine, tiny_model: Model) -> None:
    engine = make_engine()
    assert_greedy(tiny_model, engine.generate([PROMPT], greedy(8, kv_budget="full"))[0])


@pytest.mark.parametrize("budget", [0, -1, 2.5, True, "all"])
def test_budgets_that_are_none(budget: object) -> None:
    with pytest.raises(ValueError, match="kv_budget must be"):
        SamplingParams(kv_budget=budget)  # type: ignore[arg-type]


def test_the_switch_is_a_switch() -> None:
    with pytest.raises(ValueError, match="allow_full must be True or False"):
        KVSpec(allow_full=1)  # type: ignore[arg-type]
