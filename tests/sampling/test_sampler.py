from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.request import Mask, Needs, Row
from engine.sampling.sampler import SamplingDefaults
from tests.sampling.rows import Fixed, random_logits, row, sample, tokens

INF = math.inf


def histories(count: int, **params: Any) -> list[Row]:
    """Rows at `count` different positions of one sequence's stream of noise."""
    return [row(range(n + 1), prompt_len=1, seed=11, **params) for n in range(count)]


def chi_square(drawn: list[int], probs: list[float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; a token of probability 0 must not appear."""
    statistic, cells = 0.0, 0
    for token, p in enumerate(probs):
        seen = drawn.count(token)
        if p == 0.0:
            assert seen == 0
            continue
        statistic += (seen - p * len(drawn)) ** 2 / (p * len(drawn))
        cells += 1
    return statistic, cells - 1


def expected_probs(logits: list[float], temperature: float, keep: set[int]) -> list[float]:
    weights = [math.exp(x / temperature) if i in keep else 0.0 for i, x in enumerate(logits)]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize(
    ("params", "temperature", "keep"),
    [
        ({}, 1.0, {0, 1, 2, 3, 4, 5, 6}),
        ({"temperature": 2.0}, 2.0, {0, 1, 2, 3, 4, 5, 6}),
        ({"temperature": 0.5}, 0.5, {0, 1, 2, 3, 4, 5, 6}),
        ({"top_k": 3}, 1.0, {1, 4, 5}),  # 2.0, 1.5, 1.0
        ({"top_p": 0.6}, 1.0, {1, 4}),  # e^2 + e^1.5 are 0.63 of the mass
        ({"top_k": 3, "top_p": 0.6}, 1.0, {1, 4}),  # 0.51 of the three isn't enough
        ({"top_k": 3, "top_p": 0.5}, 1.0, {1}),
        ({"min_p": 0.3}, 1.0, {1, 4, 5}),  # e^-1 = 0.37 of the best, e^-1.5 = 0.22
        ({"temperature": 2.0, "min_p": 0.3}, 2.0, {0, 1, 3, 4, 5, 6}),  # after temperature
        ({"min_p": 0.3, "top_p": 0.75}, 1.0, {1, 4}),
    ],
)
def test_draws_follow_the_exact_distribution(
    params: dict[str, Any], temperature: float, keep: set[int]
) -> None:
    logits = [0.5, 2.0, -3.0, 0.0, 1.5, 1.0, -0.25]
    # many positions, without a long history for each
    drawn: list[int] = []
    for seed in range(20):
        rows = [row(range(n + 1), seed=seed, **params) for n in range(100)]
        drawn += tokens(sample(torch.tensor([logits]), rows))
    statistic, freedom = chi_square(drawn, expected_probs(logits, temperature, keep))
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


def test_large_vocabulary_follows_the_distribution_between_blocks() -> None:
    vocab = 5000
    logits = torch.full((1, vocab), -INF)
    likely = [3, 511, 512, 1023, 4999]
    logits[0, likely] = torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25]).log()
    drawn = tokens(sample(logits, histories(1500)))
    statistic, freedom = chi_square([likely.index(t) for t in drawn], [0.1, 0.3, 0.2, 0.15, 0.25])
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"temperature": 1e-4},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 5, "logprobs": 0},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 8.0},
    {"min_p": 0.1, "logprobs": 20},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"repetition_penalty": 1.3, "temperature": 0.7},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "top_p": 0.8},
    {"logit_bias": {3: 5.0, 7: -100.0}},
    {"allowed_token_ids": [1, 2, 4, 8, 700]},
    {"masks": [Mask(ban=(1, 2, 3)), None, Mask(bias={5: 1.5})]},
]


def mixed_rows(count: int) -> list[Row]:
    return [
        row(range(5, 25 + i), prompt_len=12, seed=i * 7, lineage=i % 3, **MIXED[i % len(MIXED)])
        for i in range(count)
    ]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """torch splits one long row among threads, where it can."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [1024, 50257])
@pytest.mark.parametrize("needs", [Needs(), Needs(entropy=True, watch_ids=(0, 9))])
def test_a_row_alone_gives_what_it_gives_in_a_batch(vocab: int, needs: Needs) -> None:
    logits = random_logits(33, vocab)
    logits[5:12] = logits[5:12].bfloat16().float()  # many equal values
    rows = mixed_rows(33)
    together = sample(logits, rows, needs)
    assert together == [
        sample(logits[i : i + 1].clone(), [r], needs)[0] for i, r in enumerate(rows)
    ]
    turned = [*range(20, 33), *range(20)]
    again = sample(logits[turned], [rows[i] for i in turned], needs)
    assert again == [together[i] for i in turned]


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(33, 1013)
    before = logits.clone()
    sample(logits, mixed_rows(33), Needs(entropy=True))
    assert torch.equal(before, logits)


def test_the_key_of_the_noise_is_seed_lineage_and_position() -> None:
    logits = torch.zeros(1, 1000)

    def draw(**key: Any) -> int:
        return tokens(sample(logits, [row(**key)]))[0]

    base = draw(tokens=[1, 2, 3], seed=5, lineage=9)
    assert base == draw(tokens=[7, 8, 9], seed=5, lineage=9, name="other")
    others = {
        draw(tokens=[1, 2, 3], seed=6, lineage=9),
        draw(tokens=[1, 2, 3], seed=5, lineage=8),
        draw(tokens=[1, 2, 3, 4], seed=5, lineage=9),
    }
    assert len(others) == 3
    assert base not in others


def test_lineages_draw_apart() -> None:
    rows = [row(seed=1, lineage=lineage) for lineage in range(64)]
    assert len(set(tokens(sample(torch.zeros(1, 10_000), rows)))) > 55


def test_greedy_takes_the_lowest_of_equals_after_bans_and_penalties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.9, -1.0]])
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert tokens(sample(logits, [row(**greedy)])) == [1]
    assert tokens(sample(logits, [row(**greedy, masks=[Mask(ban=[1])])])) == [2]
    assert tokens(sample(logits, [row(**greedy, masks=[Mask(ban=[1, 2])])])) == [3]
    assert tokens(sample(logits, [row([1, 2], **greedy, repetition_penalty=2.0)])) == [3]
    assert tokens(sample(logits, [row([1, 2], **greedy, presence_penalty=1.0)])) == [1]
    assert tokens(sample(logits, [row(**greedy, logit_bias={4: 10.0})])) == [4]
    assert tokens(sample(logits, [row(**greedy, allowed_token_ids=[4, 0])])) == [0]


def final_logits(logits: list[float], one: Row) -> list[float]:
    """What sampling sees, by the slow definition."""
    params, seq = one.seq.params, one.seq
    out = seq.tokens[seq.prompt_len :]
    result = []
    for token, x in enumerate(logits):
        if token in seq.tokens and params.repetition_penalty is not None:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.presence_penalty * (token in out)
        x -= params.frequency_penalty * out.count(token)
        result.append(x)
    return result


def test_penalties_count_what_their_definitions_count() -> None:
    logits = [2.0, 1.9, 1.8, -0.5, 1.7, 0.3]
    history = [0, 3, 1, 2, 2, 2, 1, 3]  # prompt 0, 3
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -0.9},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2},
    ]
    for params in settings:
        one = row(history, prompt_len=2, **params)
        expected = final_logits(logits, one)
        rows = [row(history, prompt_len=2, seed=s, **params) for s in range(500)]
        drawn = tokens(sample(torch.tensor([logits]), rows))
        probs = expected_probs(expected, 1.0, set(range(len(logits))))
        statistic, freedom = chi_square(drawn, probs)
        assert statistic < freedom + 5 * math.sqrt(2 * freedom)
        greedy = row(history, prompt_len=2, temperature=0.0, **params)
        best = max(range(len(logits)), key=lambda i: (expected[i], -i))
        assert tokens(sample(torch.tensor([logits]), [greedy])) == [best]


def test_masks_that_allow_intersect_and_biases_add() -> None:
    logits = torch.zeros(1, 10)
    masks = [Mask(allow=[1, 2, 3]), Mask(allow=[3, 2, 9]), Mask(ban=[2]), Mask(bias={3: 2.0})]
    assert set(tokens(sample(logits, [row(seed=s, masks=masks) for s in range(50)]))) == {3}
    both = [Mask(bias={4: 30.0}), Mask(bias={4: 30.0, 5: 45.0})]
    assert tokens(sample(logits, [row(masks=both, logit_bias={4: 0.5})])) == [4]


def test_a_row_with_nothing_to_sample_fails_alone() -> None:
    logits = random_logits(5, 700)
    logits[3] = -INF
    logits[4, 17] = math.nan
    rows = [
        row(name="ok", seed=1, logprobs=2),
        row(name="banned", masks=[Mask(allow=[1]), Mask(ban=[1])], logprobs=2),
        row(name="also", temperature=0.0, top_p=0.5),
        row(name="empty", top_p=0.5),
        row(name="broken", min_p=0.5, logprobs=1),
    ]
    outputs = sample(logits, rows, Needs(entropy=True))
    assert [out.token is None for out in outputs] == [False, True, False, True, True]
    for out, name in zip(outputs, ("ok", "banned", "also", "empty", "broken"), strict=True):
        assert (out.error is None) == (out.token is not None)
        assert out.error is None or name in out.error
    assert "forbid" in str(outputs[1].error)
    assert "not finite" in str(outputs[4].error)
    assert outputs[0] == sample(logits[:1], rows[:1], Needs(entropy=True))[0]


def test_a_rule_that_raises_ends_its_own_row(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Fixed):
        def mask(self, tokens: object) -> Mask | None:
            raise KeyError("no such state")

    logits = random_logits(1, 50)
    rows = [row(name=name, temperature=0.0) for name in ("a", "b")]
    rows[1].seq.rules = (Broken(None),)
    good, bad = sample(logits, rows)
    assert good.token == int(logits.argmax())
    assert bad.token is None
    assert "its logits rules failed: KeyError: 'no such state'" in str(bad.error)
    assert "no such state" in caplog.text


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e-4},
        {"temperature": 1e-300},
        {"temperature": 100.0},
        {"top_k": 10**30},
        {"top_k": 1},
        {"top_p": 1e-9},
        {"min_p": 1.0},
        {"top_k": 2, "top_p": 1e-9, "min_p": 1.0, "temperature": 1e-4},
    ],
)
@pytest.mark.parametrize("kind", ["random", "equal", "infinite", "huge", "one"])
def test_extremes(params: dict[str, Any], kind: str) -> None:
    logits: Callable[[], Tensor] = {
        "random": lambda: random_logits(1, 300),
        "equal": lambda: torch.full((1, 300), 2.5),
        "infinite": lambda: torch.full((1, 300), -INF).index_fill_(1, torch.tensor([7, 9]), 1.0),
        "huge": lambda: random_logits(1, 300, scale=1e37),
        "one": lambda: torch.tensor([[-4.0]]),
    }[kind]
    values = logits()[0]
    greedy_only = {"temperature": 1e-4, "top_p": 1e-9, "min_p": 1.0, "top_k": 1}
    for out in sample(logits(), [row(seed=s, logprobs=20, **params) for s in range(20)]):
        assert out.token is not None
        assert values[out.token] > -INF
        if kind in ("random", "huge") and any(params.get(k) == v for k, v in greedy_only.items()):
            assert out.token == int(values.argmax())
        assert out.logprob is not None
        assert all(math.isfinite(p) for p in (out.logprob.logprob, *dict(out.logprob.top).values()))


def test_equal_logits_are_all_drawn() -> None:
    logits = torch.full((1, 10), 3.0)
    settings: list[dict[str, Any]] = [
        {},
        {"min_p": 1.0},
        {"temperature": 1e-4},
        {"temperature": 100.0},
    ]
    for params in settings:
        drawn = tokens(sample(logits, [row(seed=s, **params) for s in range(300)]))
        assert set(drawn) == set(range(10))
    drawn = tokens(sample(logits, [row(seed=s, top_k=3) for s in range(100)]))
    assert set(drawn) == {0, 1, 2}
    drawn = tokens(sample(logits, [row(seed=s, top_p=0.4) for s in range(100)]))
    assert set(drawn) == {0, 1, 2, 3}


def test_defaults_fill_what_the_request_leaves_open() -> None:
    logits = random_logits(1, 400)
    defaults = SamplingDefaults(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    spelled: dict[str, Any] = {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
    }
    seeds = range(30)
    filled = sample(logits, [row(seed=s) for s in seeds], defaults=defaults)
    assert filled == sample(logits, [row(seed=s, **spelled) for s in seeds])
    greedy = sample(logits, [row(temperature=0.0)], defaults=replace(defaults, top_k=0))
    assert tokens(greedy) == [int(logits.argmax())]
    off: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    neutral = sample(logits, [row(seed=s) for s in seeds])
    assert sample(logits, [row(seed=s, **off) for s in seeds], defaults=defaults) == neutral
