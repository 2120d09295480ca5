from __future__ import annotations

from bench.common import Spread
from bench.peers import arithmetic
from bench.peers.regimes import REGIMES
from tests.bench.peers.fakes import lap

ROUNDS = [
    {"taut:bf16": lap(30), "taut:f32": lap(20), "a:q4": lap(10), "b:x": lap(40)},
    {"taut:bf16": lap(60), "taut:f32": lap(22), "a:q4": lap(30), "b:x": lap(20)},
    {"taut:bf16": lap(40), "taut:f32": lap(24), "a:q4": lap(10)},
]


def test_ratios_are_of_the_same_round() -> None:
    assert arithmetic.ratios(ROUNDS, "taut:bf16", "a:q4") == Spread(2.0, 3.0, 4.0)
    assert arithmetic.ratios(ROUNDS, "taut:bf16", "b:x") == Spread(0.75, 1.875, 3.0)
    assert arithmetic.ratios(ROUNDS, "taut:bf16", "none") is None


def test_figures_are_medians_with_their_ends() -> None:
    assert arithmetic.figures(ROUNDS)["taut:bf16"] == Spread(30, 40, 60)
    assert arithmetic.figures(ROUNDS)["b:x"] == Spread(20, 30, 40)


def test_the_best_of_each_side() -> None:
    higher = arithmetic.row(REGIMES["single"], ROUNDS)
    assert (higher.taut, higher.peer) == ("taut:bf16", "b:x")
    lower = arithmetic.row(REGIMES["memory"], ROUNDS)
    assert (lower.taut, lower.peer) == ("taut:f32", "a:q4")
    assert lower.ratio == Spread(22 / 30, 2.0, 2.4)


def test_one_side_alone_has_no_ratio() -> None:
    for label, found in (("taut:x", ("taut:x", None)), ("a:x", (None, "a:x"))):
        row = arithmetic.row(REGIMES["single"], [{label: lap(1)}])
        assert (row.taut, row.peer, row.ratio) == (*found, None)
    assert arithmetic.row(REGIMES["single"], [])[1:] == (None, None, None)


def test_agreement_counts_leading_tokens() -> None:
    rounds = [
        {"a": lap(1, 0, 1, 2, 3, 4), "b": lap(1, 0, 1, 2, 9, 4), "c": lap(1)},
        {"a": lap(1, 0, 1, 2, 3, 4), "b": lap(1, 0, 1, 2, 3, 4), "c": lap(1)},
    ]
    assert arithmetic.agreement(rounds, "b", "a") == 3.0  # of 2 and 4
    assert arithmetic.agreement(rounds, "a", "a") == 4
    assert arithmetic.agreement(rounds, "c", "a") is None


def test_others() -> None:
    assert arithmetic.others([{"a": lap(1, 0.5), "b": lap(1, None)}]) == [0.5]
