"""The generator's answers against a reading of its questions alone."""

from __future__ import annotations

from random import Random

import pytest

from bench.abacus.problems import KINDS, Habits, sample, tokens_of
from engine import abacus
from engine.abacus.notation import answer_of


@pytest.mark.parametrize("kind", KINDS)
def test_answers_follow_from_the_questions(kind: str) -> None:
    rng = Random(11)
    for least in (50, 100, 200):
        for _ in range(100):
            problem = sample(rng, kind, least, least + 100, Habits(checks=0.4, slips=0.3))
            assert answer_of(problem.question) == problem.answer
            assert tokens_of(problem.chain) >= least


def test_lengths_that_a_kind_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="found no sum problem with 900 to 950 tokens"):
        sample(Random(0), "sum", 900, 950)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("a=3 b=5; loop 2: a:a+b b:b*3; b?", "5"),
        ("a=0; loop 3: a:a-1; a?", "7"),
        ("k=4 d:k+3 m:d-k; m d k?", "3 7 4"),
        ("sum a:4+7 b:8+6; b a?", "5 1"),
    ],
)
def test_worked_examples(question: str, answer: str) -> None:
    assert answer_of(question) == answer


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is 2 + 2?", "isn't a question that the abacus knows"),
        ("a=3; loop 2: a:b+1; a?", "b is used before it has a value"),
        ("a=12; a?", "'a=12' is no statement of single digits"),
        ("sum a:4+7; b?", "b is used before"),
    ],
)
def test_other_questions_are_refused(question: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        answer_of(question)


def test_packaged_questions_have_answers() -> None:
    assert len([answer_of(question) for question in abacus.questions()]) >= 3
