"""Streams that wait for their compactions, piece by piece, say what they say without waiting."""

import math

import pytest

from engine import executor
from engine.cache.policies.tam import TAM
from engine.cache.policies.vase import VaSE
from engine.cache.policy import KVPolicy, KVSpec
from tests.conftest import MakeEngine
from tests.engines import greedy, prompts, run_all

POLICIES = [TAM(queries=16, tail=8, shortest=8), VaSE(), VaSE(variant="dkv")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{type(p).__name__} {p.queries}")
def test_how_long_they_wait_changes_nothing(
    policy: KVPolicy, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(policy), "cells_at_once", 1)  # a piece is a layer
    answers, steps = [], []
    for share in (0.0, math.inf):
        monkeypatch.setattr(executor, "_SHARE", share)
        engine = make_engine(kv=KVSpec(policy=policy, budget_tokens=32, window=16))
        for index, prompt in enumerate([prompts(8)[6]] * 3 + prompts(5)):
            engine.add([index, *prompt], greedy(70, seed=index), id=str(index))
        answers.append({id: output.token_ids for id, output in run_all(engine).items()})
        steps.append(engine.stats().kv_time["main"].steps)
    assert answers[0] == answers[1]
    assert steps[0] > steps[1], "somebody waited"
