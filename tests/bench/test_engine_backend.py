"""The engine measured in this process: what it tells of samples and of their cost."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation import prompts
from bench.evaluation.backend import Ask, Sampling
from bench.evaluation.engine_backend import EngineBackend
from bench.evaluation.records import Generation
from engine import SamplingParams
from tests.engines import open_engine, write_model


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[EngineBackend]:
    engine = open_engine(write_model(tmp_path), max_num_seqs=4, max_model_len=256)
    yield EngineBackend(engine)
    engine.close()


def ask(name: str, question: str = "2 + 2?", **sampling: Any) -> Ask:
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 0.0, "seed": 1} | sampling
    return Ask(
        key=("sums", name, 0), messages=prompts.messages(question), params=Sampling(**settings)
    )


def answers(backend: EngineBackend, asks: Iterable[Ask]) -> dict[str, Generation]:
    """By problem."""
    return {each.key[1]: made for each, made in backend.run(asks)}


def test_answers_as_the_engine_does(backend: EngineBackend) -> None:
    asks = [ask(f"p{i}", f"{i} + 2?", max_tokens=5 + i) for i in range(9)]
    made = answers(backend, asks)
    assert len(made) == 9
    for each in asks:
        params = SamplingParams(max_tokens=each.params.max_tokens, temperature=0.0, seed=1)
        (alone,) = backend._engine.generate([each.messages], params, progress=False)
        (choice,) = alone.choices
        got = made[each.key[1]]
        assert got.token_ids == choice.token_ids
        assert (got.text, got.thinking) == (choice.text, choice.thinking)
        assert (got.thinking_tokens, got.answer_tokens) == (
            choice.thinking_tokens,
            choice.answer_tokens,
        )
        assert got.output_tokens == len(choice.token_ids)
        assert got.prompt_tokens == len(alone.prompt_token_ids)
        assert got.finish_reason == choice.finish_reason
        assert got.seconds > 0


def test_asks_are_pulled_as_there_is_room(backend: EngineBackend) -> None:
    pulled = []

    def source() -> Iterator[Ask]:
        for i in range(12):
            pulled.append(i)
            yield ask(f"p{i}")

    for done, _ in enumerate(backend.run(source())):
        assert len(pulled) <= done + 4 + 4  # all of a step's ends are handed over one by one
    assert len(pulled) == 12


def test_what_the_engine_refuses_is_one_samples_error(backend: EngineBackend) -> None:
    asks = [ask("good"), ask("long", "why? " * 300), ask("also good")]
    made = answers(backend, asks)
    assert made["long"].finish_reason == "error"
    assert "maximum context length is 256" in str(made["long"].error)
    assert made["good"].error is made["also good"].error is None


def test_usage_is_of_this_backends_runs(backend: EngineBackend) -> None:
    engine = backend._engine
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3), progress=False)
    late, before = EngineBackend(engine), time.process_time()
    assert late.usage().ran_tokens in ({}, {"main": 0})
    made = answers(late, [ask(f"p{i}") for i in range(3)])
    usage = late.usage()
    # the last token of each is sampled and never run; the prompts' shared prefix runs once
    ran = sum(g.output_tokens - 1 for g in made.values())
    assert ran < usage.ran_tokens["main"] <= ran + sum(g.prompt_tokens for g in made.values())
    assert usage.steps is not None
    assert usage.steps >= 20
    assert usage.wall_seconds > 0
    assert usage.cpu_seconds is not None
    assert 0 < usage.cpu_seconds <= time.process_time() - before
    kv = engine.stats().kv["main"]
    slot = kv.side_bytes // engine.config.max_num_seqs
    assert usage.kv_peak_bytes is not None
    assert usage.kv_peak_bytes > 3 * slot
    assert (usage.kv_peak_bytes - 3 * slot) % kv.page_bytes == 0
    assert usage.kv_byte_steps is not None
    assert usage.kv_byte_steps > usage.steps * kv.page_bytes
    assert usage.kv_byte_seconds is not None
    assert usage.kv_side_byte_seconds is not None
    assert 0 < usage.kv_side_byte_seconds < usage.kv_byte_seconds


def test_the_peak_is_the_current_runs(backend: EngineBackend) -> None:
    answers(backend, [ask(f"p{i}", "long " * 30) for i in range(4)])
    high = backend.usage().kv_peak_bytes
    answers(backend, [ask("short", "1?")])
    low = backend.usage().kv_peak_bytes
    assert high is not None
    assert low is not None
    assert 0 < low < high


def test_a_model_with_markers(backend: EngineBackend) -> None:
    assert "<think>" in backend.chain_rule
    assert "</think>" in backend.chain_rule
    opened = Ask(
        key=("sums", "p", 0),
        messages=[{"role": "user", "content": "1?"}],
        params=Sampling(max_tokens=8, temperature=0.0),
    )
    ((_, made),) = backend.run([opened])
    assert made.closed is not None
