"""Every policy, under two allocations, in plain and in packed cells: prefixes that are there,
forks, chunks, and a cache too small for all at once change nothing of what a request says.
"""

from __future__ import annotations

import pytest

from engine import Engine, SamplingParams
from engine.cache.allocation import Allocation
from engine.cache.allocations.reasonalloc import ReasonAlloc
from engine.cache.allocations.uniform import Uniform
from engine.cache.policies.kara import Kara
from engine.cache.policies.vase import VaSE
from engine.cache.policy import KVPolicy, KVSpec
from engine.cache.registry import policy_classes
from engine.request import MAIN
from tests.conftest import MakeEngine
from tests.engines import greedy, prompts

PROMPT = prompts(8, seed=21, longest=112)[7]
PREFIX = PROMPT[:64]
NEW = 56  # tokens: three compactions, one of them at the prompt's end

POLICIES = {name: kind() for name, kind in policy_classes().items()} | {
    "kara": Kara(recent=6),
    "vase-dkv": VaSE(variant="dkv"),
}
ALLOCATIONS = {"uniform": Uniform(), "reasonalloc": ReasonAlloc(demand=(1.0, 2.0))}


def spec(policy: KVPolicy, allocation: Allocation, format: str) -> KVSpec:
    return KVSpec(
        format=format,  # type: ignore[arg-type]
        tail_tokens=8,
        policy=policy,
        allocation=allocation,
        budget_tokens=80 if policy.bounded else 10,
        window=24,
    )


def said(engine: Engine, *, company: bool) -> list[tuple[int, ...]]:
    """Both choices of one request: the second forks the first one's prompt."""
    if company:
        for number, length in enumerate((64, 40, 90)):
            engine.add([*PREFIX, *PROMPT[:number]], greedy(length), id=str(number))
        for _ in range(5):
            engine.step()
    params = SamplingParams(temperature=0.9, seed=4, n=2, max_tokens=NEW, ignore_eos=True)
    engine.add(PROMPT, params, id="x")
    found: list[tuple[int, ...]] = []
    while engine.has_work():
        for delta in engine.step():
            if delta.id == "x" and delta.output is not None:
                found = [choice.token_ids for choice in delta.output.choices]
    engine.check()
    return found


@pytest.mark.parametrize("format", ["bf16", "int4"])
@pytest.mark.parametrize("allocation", ALLOCATIONS.values(), ids=ALLOCATIONS)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_company_changes_nothing(
    policy: KVPolicy, allocation: Allocation, format: str, make_engine: MakeEngine
) -> None:
    kv = spec(policy, allocation, format)
    # a growing cache would be preempted and computed again, which the API says may change it
    room = 420 if policy.bounded else 2000
    alone = said(make_engine(kv=kv), company=False)
    engine = make_engine(kv=kv, kv_tokens=room, max_num_seqs=5, max_batched_tokens=40)
    assert said(engine, company=True) == alone
    assert [len(tokens) for tokens in alone] == [NEW, NEW]
    assert alone[0] != alone[1]
    stats = engine.stats()
    assert stats.kv[MAIN].evicted_cells > 0
    assert stats.scheduler.preemptions == 0


@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_the_company_has_prefixes_to_share(format: str, make_engine: MakeEngine) -> None:
    engine = make_engine(kv=spec(POLICIES["snapkv"], Uniform(), format), max_num_seqs=5)
    said(engine, company=True)
    every = sum(64 + number + length - 1 for number, length in enumerate((64, 40, 90)))
    every += len(PROMPT) + 2 * (NEW - 1)
    assert engine.stats().scheduler.ran_tokens[MAIN] <= every - 48


def test_a_growing_cache_that_is_too_small_is_preempted_and_ends(make_engine: MakeEngine) -> None:
    engine = make_engine(kv=spec(Kara(recent=6), Uniform(), "bf16"), kv_tokens=300, max_num_seqs=5)
    assert [len(tokens) for tokens in said(engine, company=True)] == [NEW, NEW]
    assert engine.stats().scheduler.preemptions > 0
