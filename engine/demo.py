"""`taut demo`: the packaged model thinks through questions whose answers are known."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from engine.abacus.notation import answer_of
from engine.engine import Engine
from engine.output import Choice
from engine.request import SamplingParams
from engine.terminal import Paper, print_stream


def check(questions: Seq[str]) -> None:
    """ValueError: one that the abacus doesn't know."""
    for question in questions:
        answer_of(question)


def show(engine: Engine, questions: Seq[str], params: SamplingParams) -> None:
    """Each question's thinking as it grows, its answer, whether that is right, and what it took."""
    paper = Paper()
    for question in questions:
        paper.note(f"> {question}\n")
        begin = time.perf_counter()
        (choice,) = print_stream(
            engine.stream([{"role": "user", "content": question}], params)
        ).choices
        paper.note(f"{verdict(question, choice)} {_took(choice, time.perf_counter() - begin)}\n\n")


def verdict(question: str, choice: Choice) -> str:
    """In words; what counts is the answer as it stands, without the space around it."""
    expected = answer_of(question)
    if choice.text.strip() == expected:
        return "right:"
    return f"wrong, it is {expected}:"


def _took(choice: Choice, seconds: float) -> str:
    tokens = len(choice.token_ids)
    return f"{tokens} tokens in {seconds:.2f} s, {choice.thinking_tokens} of them thinking"
