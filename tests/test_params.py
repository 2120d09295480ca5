"""Every sampling parameter through the whole engine, against definitions written out plainly.

The model's raw logits are taped; what each token had to be, or could be, follows from them.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, ModelSpec, Output, SamplingParams
from tests.conftest import MakeEngine
from tests.engines import Model, Tape, prompts, run_all

PROMPT = prompts(6, seed=21)[5]
LENGTH = 40


def adjusted(raw: Tensor, prompt: tuple[int, ...], output: list[int], p: SamplingParams) -> Tensor:
    """Bans and biases, then penalties."""
    values = raw.double().tolist()
    if p.allowed_token_ids is not None:
        values = [v if i in p.allowed_token_ids else -torch.inf for i, v in enumerate(values)]
    for token, bias in (p.logit_bias or {}).items():
        values[token] += bias
    repetition = p.repetition_penalty or 1.0
    for token in {*prompt, *output}:
        values[token] *= repetition if values[token] < 0 else 1 / repetition
    for token, times in Counter(output).items():
        values[token] -= p.presence_penalty + p.frequency_penalty * times
    return torch.tensor(values, dtype=torch.float64)


def survivors(logits: Tensor, p: SamplingParams) -> set[int]:
    """min_p, top_k, top_p in this order, each over what the last left."""
    assert p.temperature
    probs = (logits / p.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    kept = [i for i in order if probs[i] >= (p.min_p or 0.0) * probs.max() * (1 - 1e-5)]
    kept = kept[: p.top_k or len(kept)]
    total, share = float(probs[kept].sum()), 0.0
    nucleus = []
    for token in kept:
        if share >= (p.top_p or 1.0) * total * (1 + 1e-5):
            break
        nucleus.append(token)
        share += float(probs[token])
    return set(nucleus)


def answer(engine: Engine, params: SamplingParams) -> tuple[Output, Tensor]:
    """In company, and the raw logits before each of its tokens [N, V]."""
    tape = Tape(engine)
    engine.add(PROMPT, params, id="x")
    for other in prompts(4, seed=22):
        engine.add(other, SamplingParams(temperature=1.0, seed=1, max_tokens=12))
    output = run_all(engine)["x"]
    assert len(output.token_ids) == LENGTH
    return output, tape.stacked("x")


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {5: 9.0, 17: 8.5, 141: -100.0}},
        {"allowed_token_ids": [3, 9, 44, 80, 120, 200]},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.8},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 0.7},
        {"presence_penalty": -1.0, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"logit_bias": {5: 4.0}, "allowed_token_ids": [5, 6, 7, 8], "frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_greedy_after_what_changes_logits(fields: dict[str, Any], make_engine: MakeEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, **fields)
    output, raw = answer(make_engine(), params)
    tokens = list(output.token_ids)
    for at, token in enumerate(tokens):
        logits = adjusted(raw[at], output.prompt_token_ids, tokens[:at], params)
        assert logits.max() - logits[token] <= 1e-4
    assert tokens != raw.argmax(-1).tolist(), "the parameter must matter"


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"top_k": 3}, 3),
        ({"temperature": 2.0, "top_p": 0.3}, 120),
        ({"temperature": 2.0, "min_p": 0.3}, 120),
        ({"temperature": 0.2}, 304),
        ({"temperature": 3.0, "min_p": 0.5, "top_k": 30, "top_p": 0.6}, 30),
        ({"top_k": 5, "repetition_penalty": 1.6, "presence_penalty": 1.0}, 5),
    ],
    ids=str,
)
def test_random_among_what_filters_leave(
    fields: dict[str, Any], most: int, make_engine: MakeEngine
) -> None:
    neutral: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    given: dict[str, Any] = neutral | {"max_tokens": LENGTH, "seed": 5} | fields
    params = SamplingParams(ignore_eos=True, **given)
    output, raw = answer(make_engine(), params)
    tokens = list(output.token_ids)
    for at, token in enumerate(tokens):
        logits = adjusted(raw[at], output.prompt_token_ids, tokens[:at], params)
        kept = survivors(logits, params)
        assert token in kept
        assert len(kept) <= most
    assert answer(make_engine(), params)[0].token_ids == output.token_ids
    other = answer(make_engine(), replace(params, seed=6))[0]
    assert other.token_ids != output.token_ids


def test_a_models_own_settings_fill_the_gaps_and_can_be_switched_off(tiny_model: Model) -> None:
    """Temperature 0.6, top_k 20 and top_p 0.95, as its generation_config.json says."""
    gaps = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=4)
    own = replace(gaps, temperature=0.6, top_k=20, top_p=0.95)
    neutral = replace(gaps, temperature=1.0, top_k=0, top_p=1.0)
    said = {}
    for on in (True, False):
        spec = ModelSpec(str(tiny_model.folder), generation_defaults=on)
        config = EngineConfig(models={"main": spec}, kv_bytes=1 << 26, threads=1)
        with Engine(config) as engine:
            outputs = engine.generate([PROMPT] * 3, [gaps, own, neutral])
            said[on] = [output.token_ids for output in outputs]
    assert said[True][0] == said[True][1] == said[False][1]
    assert said[False][0] == said[False][2] == said[True][2]
    assert said[True][0] != said[False][0]


def test_no_seed_is_another_each_time_and_the_engines_seed_makes_it_come_again(
    make_engine: MakeEngine,
) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [make_engine(seed=seed).generate([PROMPT] * 2, params) for seed in (1, 1, 2)]
    (one, two), again, (other, _) = runs
    assert [output.token_ids for output in again] == [one.token_ids, two.token_ids]
    assert len({one.token_ids, two.token_ids, other.token_ids}) == 3


def test_logprobs_are_of_the_raw_distribution_whatever_changes_it(make_engine: MakeEngine) -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=2,
        seed=3,
        max_tokens=LENGTH,
        ignore_eos=True,
        logit_bias={5: 3.0},
        repetition_penalty=1.3,
        logprobs=2,
    )
    output, raw = answer(make_engine(), params)
    said = output.choices[0].logprobs
    assert said is not None
    for token, logits, logprob in zip(output.token_ids, raw, said, strict=True):
        truth = logits.double().log_softmax(-1)
        best = truth.topk(2)
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(float(truth[token]), abs=1e-4)
        assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-4)
