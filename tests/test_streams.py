"""Pieces while a request runs: streams, steps, ids and aborts, in any mixture."""

import pytest

from engine import SamplingParams
from engine.output import Delta
from engine.request import Batch, StepOutput
from tests.conftest import MakeEngine
from tests.engines import Model, assert_greedy, greedy, prompts, run_all


def test_stream_is_generate(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for prompt in prompts(4, seed=3):
        params = SamplingParams(
            temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2, stop=["e"]
        )
        (whole,) = engine.generate([prompt], params)
        deltas = list(engine.stream(prompt, params))
        assert _joined(deltas) == (whole.text, whole.thinking, whole.token_ids)
        assert sum((d.logprobs for d in deltas), ()) == whole.choices[0].logprobs
        *_, last = deltas
        assert last.output is not None
        assert last.output.choices == whole.choices
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)


def _joined(deltas: list[Delta]) -> tuple[str, str, tuple[int, ...]]:
    return (
        "".join(d.text for d in deltas),
        "".join(d.thinking for d in deltas),
        sum((d.token_ids for d in deltas), ()),
    )


def test_closing_a_stream_frees_all_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=64)
    other = engine.add([1, 2, 3], greedy(6))
    stream = engine.stream(prompts(8)[7], greedy(200))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.stats().scheduler.running == 1
    outputs = run_all(engine)  # nothing of the closed stream comes out here
    assert list(outputs) == [other]
    assert len(outputs[other].token_ids) == 6


def test_open_streams_run_each_other_along(tiny_model: Model, make_engine: MakeEngine) -> None:
    """Whoever steps, each delta reaches the stream that asked for it, and only that."""
    engine = make_engine()
    streams = [engine.stream(prompt, greedy(10)) for prompt in ([1, 2], [3, 4], [5] * 40)]
    deltas = [[next(stream)] for stream in streams]
    assert engine.step() == []
    for own, stream in zip(deltas, streams, strict=True):
        own += stream
        assert [d.id for d in own] == [own[0].id] * 10
        output = own[-1].output
        assert output is not None
        assert _joined(own)[2] == output.token_ids
        assert_greedy(tiny_model, output)


def test_closing_a_stream_keeps_others_deltas(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = engine.stream([1, 2, 3], greedy(20))
    next(stream)
    engine.add([4, 5, 6], greedy(5), id="other")
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    deltas = []
    while engine.has_work():
        deltas += engine.step()
    assert sum((d.token_ids for d in deltas), ()) == deltas[-1].output.token_ids  # type: ignore[union-attr]


def test_generate_keeps_others_deltas_for_step(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1, 2, 3], greedy(20), id="mine")
    first = engine.step()
    (aside,) = engine.generate([[4, 5, 6]], greedy(10))
    assert_greedy(tiny_model, aside)
    deltas = first
    while engine.has_work():
        deltas += engine.step()
    assert {d.id for d in deltas} == {"mine"}
    output = deltas[-1].output
    assert output is not None
    assert _joined(deltas) == (output.text, output.thinking, output.token_ids)
    assert_greedy(tiny_model, output)


# ids and aborts


def test_abort_gives_what_there_is(tiny_model: Model, make_engine: MakeEngine) -> None:
    engine = make_engine(max_batched_tokens=16, max_num_seqs=2)
    for id, prompt in (("decoding", [1, 2]), ("prefilling", [3] * 90), ("waiting", [4, 5])):
        engine.add(prompt, greedy(50), id=id)
    for _ in range(4):
        engine.step()
    for id in ("decoding", "prefilling", "waiting", "unknown"):
        engine.abort(id)
    assert engine.stats().kv["main"].used_pages == 0
    outputs = run_all(engine)
    assert {o.finish_reason for o in outputs.values()} == {"abort"}
    assert {id: len(o.token_ids) for id, o in outputs.items()} == {
        "decoding": 4,
        "prefilling": 0,
        "waiting": 0,
    }
    assert_greedy(tiny_model, outputs["decoding"])


def test_abort_while_the_last_chunk_is_in_flight(make_engine: MakeEngine) -> None:
    """What the model answers to it is void (sgl-project/sglang#34149)."""
    engine = make_engine(max_batched_tokens=16, max_num_seqs=2)
    executor = engine._executors["main"]
    run = executor.run

    def run_and_abort(batch: Batch) -> StepOutput:
        out = run(batch)
        if batch.rows[0].samples:
            engine.abort("x")
            assert engine.stats().kv["main"].used_pages == 0
        return out

    executor.run = run_and_abort  # type: ignore[method-assign]
    engine.add([3] * 40, greedy(20), id="x")
    output = run_all(engine)["x"]
    assert (output.token_ids, output.finish_reason) == ((), "abort")
    assert engine.stats().scheduler.ran_tokens == {"main": 32}


def test_an_id_is_unique_while_it_lives(tiny_model: Model, make_engine: MakeEngine) -> None:
    """vllm-project/vllm#15041"""
    engine = make_engine()
    engine.add([1, 2, 3], greedy(10), id="x")
    engine.step()
    with pytest.raises(ValueError, match="'x' is in use"):
        engine.add([4, 5], greedy(10), id="x")
    assert_greedy(tiny_model, run_all(engine)["x"])
    engine.add([4, 5], greedy(10), id="x")
    assert run_all(engine)["x"].prompt_token_ids == (4, 5)


def test_own_ids_dont_meet_callers_ids(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add([1], greedy(2), id="request-0")
    assert engine.add([2], greedy(2)) != "request-0"
    assert len(run_all(engine)) == 2
