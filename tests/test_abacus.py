"""What a newcomer meets first: the packaged pair, without a download."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine import Engine, SamplingParams, abacus
from engine.abacus.notation import answer_of

pytestmark = pytest.mark.abacus


def taut(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engine.cli", *args]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=120)


def test_demo_answers_every_packaged_question() -> None:
    done = taut("demo")
    answers = [line for line in done.stdout.splitlines() if line]
    assert answers == [answer_of(question) for question in abacus.questions()]
    assert done.stderr.count("\nright: ") == len(abacus.questions())


def test_generate_thinks_and_answers_by_default() -> None:
    done = taut("generate", "a=3 b=5; loop 2: a:a+b; a?")
    assert done.stdout.strip() == "3"
    assert "a=8+b=5>a=3" in done.stderr


@pytest.mark.parametrize("name", abacus.NAMES)
def test_its_chain_is_thinking(name: str) -> None:
    question = abacus.questions()[0]
    with Engine(name) as engine:
        (output,) = engine.generate([[{"role": "user", "content": question}]])
    assert output.finish_reason == "stop"
    assert output.choices[0].thinking_tokens > 20


def test_together_they_are_small() -> None:
    files = [file for name in abacus.NAMES for file in abacus.folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) < 12e6


def test_a_thinking_budget_still_answers() -> None:
    params = SamplingParams(temperature=0.0, thinking_token_budget=16)
    with Engine("abacus") as engine:
        (output,) = engine.generate([[{"role": "user", "content": abacus.questions()[0]}]], params)
    assert output.choices[0].thinking_tokens == 16
    assert output.text.strip()
