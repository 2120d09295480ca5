"""Bits chosen by measuring: what is right, which is best, and from command to engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.abacus import write_problems
from engine import Engine, EngineConfig, KVSpec, ModelSpec, SamplingParams
from engine.cache.breadth import bits_file, read_choices, write_choice
from engine.cache.policies.snapkv import SnapKV
from engine.calibrate.kv_bits import Candidate, best, calibrate, is_right, read_problems
from engine.request import MAIN
from tests.engines import Model, greedy, write_model

HEADS, CELL = 4, 2 * 16 * 2 + 4  # of the tiny model in bf16
KV = KVSpec(
    policy=SnapKV(), budget_bytes=HEADS * CELL * 40, window=16, tail_tokens=16, tail_format="bf16"
)

SAMPLED = SamplingParams(temperature=1.5, max_tokens=80, ignore_eos=True)
"""Hot enough for the noise of few bits to show in the tokens of a model that knows nothing."""


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return write_model(tmp_path / "tiny")


def engine_with(model: Model, kv: KVSpec) -> Engine:
    spec = ModelSpec(str(model.folder), kv=kv)
    return Engine(EngineConfig(models={MAIN: spec}, threads=1, kv_bytes=16_000_000))


def own_answers(model: Model, kv: KVSpec, file: Path) -> None:
    """Problems whose right answers are what the model says with such a cache."""
    questions = [f"What about number {i}, and what of the ones after it?" for i in range(4)]
    with engine_with(model, kv) as engine:
        asked = [[{"role": "user", "content": question}] for question in questions]
        outputs = engine.generate(asked, [replace(SAMPLED, seed=i) for i in range(len(asked))])
    rows = [
        {"question": question, "answer": output.text, "instruction": ""}
        for question, output in zip(questions, outputs, strict=True)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_most_right_is_chosen_and_reaches_the_engine(model: Model, tmp_path: Path) -> None:
    """Answers are what four bits say, so nothing else is right."""
    problems = tmp_path / "problems.jsonl"
    four = replace(KV, format="int4")
    own_answers(model, four, problems)
    calibrated = KVSpec(
        format="calibrated", policy=SnapKV(), budget_bytes=KV.budget_bytes, window=KV.window
    )
    with pytest.raises(ValueError, match=r"taut calibrate kv-bits.*has nothing, not budget_bytes="):
        engine_with(model, calibrated)
    spec, seen = ModelSpec(str(model.folder), kv=KV), list[Candidate]()
    file, chosen = calibrate(spec, problems, SAMPLED, threads=1, show=seen.append)
    assert file == bits_file(model.folder)
    assert [each.format for each in seen] == ["bf16", "int8", "int4", "int2"]
    assert (chosen.format, chosen.right, chosen.problems) == ("int4", 4, 4)
    assert seen[0].right < 4
    assert seen[0].cells == 40
    assert [each.cells for each in seen] == sorted(each.cells for each in seen)
    assert all(each.capped == 4 and each.mean_tokens == 80 for each in seen)
    assert seen[0].kv_byte_steps > 0
    (choice,) = read_choices(file)
    assert [each["right"] for each in choice["candidates"]] == [each.right for each in seen]
    prompt = list(range(5, 60))
    with engine_with(model, calibrated) as engine, engine_with(model, four) as named:
        assert engine.models[MAIN].spec.kv == named.models[MAIN].spec.kv
        assert engine.generate(prompt, greedy(9))[0].token_ids == (
            named.generate(prompt, greedy(9))[0].token_ids
        )
    with pytest.raises(ValueError, match=r"window=16.*, not .*window=24"):
        engine_with(model, replace(calibrated, window=24))


def test_the_best_of_candidates() -> None:
    def made(format: str, right: int, capped: int) -> Candidate:
        return Candidate(
            format=format,
            cells=9,
            problems=20,
            right=right,
            capped=capped,
            mean_tokens=50.0,
            kv_byte_steps=1,
        )

    bf16, int4, int2 = made("bf16", 10, 5), made("int4", 12, 9), made("int2", 12, 8)
    assert best([bf16, int4]) is int4  # more right
    assert best([bf16, int4, int2]) is int2  # as many right, fewer cut
    assert best([replace(int2, capped=9), int4]) is int4  # alike: more bits


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (r"so \boxed{3} or \boxed{4}", "4", True),
        (r"so \boxed{4} or \boxed{3}", "4", False),
        (r"\boxed{1,200}", "1200.0", True),
        (r"\boxed{\$ 5}", "5", False),
        (r"\boxed{$5}", "5", True),
        ("3  4\n", "3 4", True),
        ("3 4", "34", False),
        ("the answer is 4", "4", False),
        (r"\boxed{1/2}", "0.5", True),
        (r"\boxed{1/0}", "1/0", True),
    ],
)
def test_what_is_right(text: str, answer: str, right: bool) -> None:
    assert is_right(text, answer) is right


def test_problems_are_read(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    write_problems.main([str(file), "--limit", "2", "--seed", "7"])
    first, second = read_problems(file)
    assert first.instruction == second.instruction == ""
    assert first.question != second.question
    file.write_text('\n{"question": "1 + 1?", "answer": 2}\n')
    (asked,) = read_problems(file)
    assert asked.answer == "2"
    assert "boxed" in asked.instruction
    for text, words in (
        ("", "holds no problems"),
        ('{"question": "?"}', "p.jsonl:1 must be a JSON object with question and answer"),
        ("3", "p.jsonl:1 must be"),
        ('{"question": " ", "answer": "2"}', "must not be empty"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_problems(file)


def test_choices_stand_beside_each_other(tmp_path: Path) -> None:
    file = tmp_path / "m.kv-bits.json"
    for budget, format in ((1, "int8"), (2, "int2"), (1, "bf16")):
        cells = {"format": format, "tail_tokens": 64, "tail_format": "bf16"}
        write_choice(file, {"for": {"budget_bytes": budget}, "cells": cells})
    found = {c["for"]["budget_bytes"]: c["cells"]["format"] for c in read_choices(file)}
    assert found == {1: "bf16", 2: "int2"}
    file.write_text("[]")
    with pytest.raises(ValueError, match="is no file of `taut calibrate kv-bits`"):
        read_choices(file)


def test_what_cannot_be_measured_is_refused(model: Model, tmp_path: Path) -> None:
    problems = tmp_path / "p.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": 2}\n')
    spec = ModelSpec(str(model.folder), kv=replace(KV, budget_bytes=HEADS * CELL))
    with pytest.raises(ValueError, match=r"no format can be measured: bf16: .*holds 1 cells"):
        calibrate(spec, problems, greedy(4), threads=1)
    with pytest.raises(ValueError, match="limit must be at least 1"):
        calibrate(spec, problems, greedy(4), limit=0)
    with pytest.raises(ValueError, match="format calibrated is one chosen for a budget_bytes"):
        KVSpec(format="calibrated", policy=SnapKV(), budget_tokens=32)
    with pytest.raises(ValueError, match="tail_tokens=16: format calibrated brings its own"):
        replace(KV, format="calibrated", tail_format="auto")
