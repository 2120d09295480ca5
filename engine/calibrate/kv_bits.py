"""How many bits a cell should have: fewer bits are more cells of the same bytes.

Spend Bytes on Breadth (arXiv 2610.05685): for each number of bits b the byte budget holds N(b)
cells (`KVFormat.cells_in`), and which is best no error of attention foretells; so the whole is run
on calibration problems with each, and the most accurate is taken; of equals the one with fewer
answers cut at the limit, then the one of more bits. The paper has 60 problems, its prompts are kept
whole and aren't counted, and it evicts by SnapKV; here any policy may, and everything counts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from engine.cache.breadth import CELLS, bits_file, read_choices, write_choice
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.model.checkpoint import open_checkpoint
from engine.output import Output
from engine.prompt import Prompt
from engine.request import MAIN, SamplingParams

FORMATS = ("bf16", "int8", "int4", "int2")
"""The candidates, most bits first."""

INSTRUCTION = r"Reason step by step, and put your final answer within \boxed{}."

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


class Problem(NamedTuple):
    """`instruction` stands behind the question."""

    question: str
    answer: str
    instruction: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A format, the cells a head that the bytes hold in it, and what came of the problems."""

    format: str
    cells: int
    problems: int
    right: int
    capped: int  # cut at the limit
    mean_tokens: float
    kv_byte_steps: int  # memory-time


def read_problems(file: Path) -> list[Problem]:
    """JSON lines with `question`, `answer` and perhaps `instruction`. ValueError names the line."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = Problem(
                str(row["question"]), str(row["answer"]), str(row.get("instruction", INSTRUCTION))
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{file}:{number} must be a JSON object with question and answer"
            ) from None
        if not problem.question.strip() or not problem.answer.strip():
            raise ValueError(f"{file}:{number}: question and answer must not be empty")
        found.append(problem)
    if not found:
        raise ValueError(f"{file} holds no problems")
    return found


def is_right(text: str, answer: str) -> bool:
    """The last box, or without one the whole text, is the answer: as a number or word for word."""
    boxes = _BOX.findall(text)
    given, expected = ((boxes[-1] if boxes else text), answer)
    numbers = _number(given), _number(expected)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return given.split() == expected.split()


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text.strip().strip("$%").replace(",", "").strip())
    except (ValueError, ZeroDivisionError):
        return None


def measure(
    spec: ModelSpec,
    problems: Sequence[Problem],
    params: SamplingParams,
    *,
    threads: int | None = None,
    show: Callable[[Candidate], None] = lambda candidate: None,
) -> list[Candidate]:
    """Every format that the bytes of `spec.kv` hold enough cells in. ValueError: in none."""
    found, refused = list[Candidate](), list[str]()
    for name in FORMATS:
        kv = replace(spec.kv, format=name)  # type: ignore[arg-type]
        config = EngineConfig(models={MAIN: replace(spec, kv=kv)}, threads=threads)
        try:
            engine = Engine(config)
        except ValueError as error:
            refused.append(f"{name}: {error}")
            continue
        with engine:
            found.append(_candidate(name, engine, problems, params))
        show(found[-1])
    if not found:
        raise ValueError(f"no format can be measured: {'; '.join(refused)}")
    return found


def _candidate(
    name: str, engine: Engine, problems: Sequence[Problem], params: SamplingParams
) -> Candidate:
    asked = [_prompt(engine, problem) for problem in problems]
    each = [replace(params, seed=number) for number in range(len(asked))]
    outputs = engine.generate(asked, each)
    return Candidate(
        format=name,
        cells=engine.models[MAIN].spec.kv.budget,
        problems=len(problems),
        right=sum(
            is_right(output.text, problem.answer)
            for output, problem in zip(outputs, problems, strict=True)
        ),
        capped=sum(output.finish_reason == "length" for output in outputs),
        mean_tokens=_mean_tokens(outputs),
        kv_byte_steps=engine.stats().kv_time[MAIN].byte_steps,
    )


def _prompt(engine: Engine, problem: Problem) -> Prompt:
    text = "\n\n".join(filter(None, (problem.question, problem.instruction)))
    if engine.tokenizer.chat_template is None:
        return text
    return [{"role": "user", "content": text}]


def _mean_tokens(outputs: Sequence[Output]) -> float:
    return sum(len(output.token_ids) for output in outputs) / len(outputs)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The most right, then the fewest capped, then the most bits (`FORMATS` order)."""
    return max(candidates, key=lambda c: (c.right, -c.capped, -FORMATS.index(c.format)))


def calibrate(
    spec: ModelSpec,
    problems: Path,
    params: SamplingParams,
    *,
    limit: int | None = None,
    threads: int | None = None,
    show: Callable[[Candidate], None] = lambda candidate: None,
) -> tuple[Path, Candidate]:
    """Measure and store the choice for `spec.kv`; where, and which."""
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, not {limit}")
    listed = read_problems(problems)[:limit]
    checkpoint = open_checkpoint(spec.model)
    file = bits_file(checkpoint.path)
    if not os.access(file.parent, os.W_OK):
        raise ValueError(f"{file} can't be written: copy the model to a folder of yours")
    read_choices(file)  # what is there is seen to be one before work starts
    candidates = measure(spec, listed, params, threads=threads, show=show)
    chosen = best(candidates)
    kv = replace(spec.kv, format=chosen.format)  # type: ignore[arg-type]
    write_choice(
        file,
        {
            "for": spec.kv.breadth(),
            "cells": {name: getattr(kv, name) for name in CELLS},
            "model": checkpoint.source,
            "candidates": [asdict(candidate) for candidate in candidates],
        },
    )
    return file, chosen
