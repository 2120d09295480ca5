"""What is said of a token: its logprob, the best others, entropy, watched ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.request import Needs, RowOutput
from engine.sampling.sampler import Sampler, SamplingDefaults
from tests.sampling.rows import random_logits, row, sample

INF = math.inf


def raw(out: RowOutput) -> tuple[float, dict[int, float]]:
    assert out.logprob is not None
    return out.logprob.logprob, dict(out.logprob.top)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(1, 900)
    exact = logits.double().log_softmax(-1)[0]
    settings: list[dict[str, Any]] = [
        {"top_k": 1},
        {"temperature": 0.3, "repetition_penalty": 1.5},
        {"logit_bias": {5: 50.0}},
    ]
    for params in settings:
        (out,) = sample(logits, [row(logprobs=4, **params)])
        own, best = raw(out)
        assert out.logprob is not None
        assert out.logprob.token_id == out.token
        assert own == pytest.approx(float(exact[out.token or 0]), abs=1e-5)
        order = exact.argsort(descending=True)[:4].tolist()
        assert list(best) == order
        assert list(best.values()) == pytest.approx(exact[order].tolist(), abs=1e-5)
    assert out.token == 5  # reported, though it isn't among the best
    assert 5 not in best


def test_logprobs_order_equals_by_id_and_are_finite() -> None:
    logits = torch.full((1, 2000), -INF)
    logits[0, [1500, 30, 700]] = 1.0
    (out,) = sample(logits, [row(logprobs=6, top_k=1)])
    own, best = raw(out)
    assert own == pytest.approx(math.log(1 / 3))
    assert list(best) == [30, 700, 1500, 0, 1, 2]
    assert list(best.values())[3:] == [-9999.0] * 3


def test_logprobs_only_where_asked() -> None:
    rows = [row(logprobs=2), row(), row(logprobs=0), row(logprobs=20)]
    outputs = sample(random_logits(1, 50), rows)
    counts = [None if o.logprob is None else len(o.logprob.top) for o in outputs]
    assert counts == [2, None, 0, 20]
    assert all(out.entropy is None and out.watch == () for out in outputs)
    (tiny,) = sample(torch.zeros(1, 3), [row(logprobs=20)])
    assert len(raw(tiny)[1]) == 3


def test_entropy_and_watched_ids() -> None:
    logits = random_logits(4, 3000)
    logits[1] = 0.0
    logits[2] = -INF
    logits[2, 5] = 1.0
    exact = logits.double().log_softmax(-1).clamp(min=-9999.0)
    outputs = sample(logits, [row(temperature=0.0)] * 4, Needs(entropy=True, watch_ids=(5, 8)))
    for out, log_p in zip(outputs, exact, strict=True):
        assert out.entropy == pytest.approx(float(-(log_p.exp() * log_p).sum()), abs=1e-4)
        assert out.watch == pytest.approx([float(log_p[5]), float(log_p[8])], abs=1e-4)
    assert outputs[1].entropy == pytest.approx(math.log(3000), abs=1e-5)
    watched = sample(logits, [row(temperature=0.0)] * 4, Needs(watch_ids=(5,)))
    assert [out.watch[0] for out in watched] == [out.watch[0] for out in outputs]
    assert all(out.entropy is None for out in watched)


def test_score_gives_known_tokens() -> None:
    logits = random_logits(6, 800)
    logits[2, 40] = -INF
    targets = [0, 799, 40, 3, 4, 5]
    exact = logits.double().log_softmax(-1)
    scored = Sampler(800, SamplingDefaults()).score(logits, targets, 3)
    assert [s.token_id for s in scored] == targets
    assert scored[2].logprob == -9999.0
    for one, log_p, target in zip(scored, exact, targets, strict=True):
        assert one.logprob == pytest.approx(max(float(log_p[target]), -9999.0), abs=1e-5)
        assert [i for i, _ in one.top] == log_p.argsort(descending=True)[:3].tolist()
    alone = Sampler(800, SamplingDefaults()).score(logits[3:4], targets[3:4], 3)
    assert alone == scored[3:4]
    assert Sampler(800, SamplingDefaults()).score(logits[:0], [], 3) == []
