"""AsyncEngine when something breaks: its thread, a batch, a row, a reader's loop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.output import Output
from engine.request import SamplingParams
from engine.service import AsyncEngine, EngineDead
from tests.scripted import tiny_folder, tiny_spec
from tests.services import GREEDY, LONG, PROMPT, Gate, empty, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def config(folder: str) -> EngineConfig:
    return tiny_spec(folder, max_num_seqs=4)


@pytest.fixture(scope="module")
def expected(config: EngineConfig) -> tuple[int, ...]:
    with Engine(config) as engine:
        return engine.generate(PROMPT, GREEDY)[0].token_ids


def test_the_engine_s_thread_dies(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        engine = AsyncEngine(config)
        gate = Gate(engine)
        streams = [await engine.submit(PROMPT, LONG) for _ in range(6)]
        await gate.wait()
        failure = OSError("the roof fell in")

        def fail(*_: object) -> None:
            raise failure

        monkeypatch.setattr(engine.engine._scheduler, "schedule", fail)
        late = await engine.submit(PROMPT, LONG)  # its command is never run
        gate.release()
        for stream in (*streams, late):
            with pytest.raises(EngineDead, match="the roof fell in") as info:
                await asyncio.wait_for(stream.output(), 20)
            assert info.value.__cause__ is failure
            assert [delta async for delta in stream] == []
            stream.cancel()
        assert not engine.alive
        with pytest.raises(EngineDead, match="the roof fell in"):
            await engine.submit(PROMPT)
        await asyncio.wait_for(engine.close(), 20)
        assert not engine._live

    asyncio.run(main())
    assert "the engine's thread failed" in caplog.text


def test_a_batch_that_fails_ends_its_own_requests(
    config: EngineConfig, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            decoder = engine.engine._executors["main"].decoder
            forward = decoder.forward

            def fail(*_: object) -> Any:
                raise RuntimeError("out of memory")

            decoder.forward = fail  # type: ignore[assignment,method-assign]
            many = SamplingParams(n=2, max_tokens=4)
            outputs = await asyncio.gather(
                engine.generate(PROMPT, GREEDY), engine.generate(PROMPT, many)
            )
            for output in outputs:
                for choice in output.choices:
                    assert choice.finish_reason == "error"
                    assert "RuntimeError: out of memory" in str(choice.stop_reason)
            decoder.forward = forward  # type: ignore[method-assign]
            assert (await engine.generate(PROMPT, GREEDY)).token_ids == expected

    asyncio.run(main())
    assert "a batch of role main failed" in caplog.text


def test_a_row_that_cannot_be_sampled_ends_alone(
    config: EngineConfig, expected: tuple[int, ...]
) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            decoder = engine.engine._executors["main"].decoder
            logits = decoder.logits

            def spoilt(hidden: Any) -> Any:
                out = logits(hidden)
                return out.index_fill_(0, out.new_tensor([len(out) - 1]).long(), float("nan"))

            gate = Gate(engine)
            first = await engine.submit(PROMPT, GREEDY)
            await gate.wait()
            second = await engine.submit(PROMPT[:5], GREEDY)
            gate.step()
            await gate.wait()
            decoder.logits = spoilt  # type: ignore[method-assign]
            gate.step()
            await gate.wait()
            decoder.logits = logits  # type: ignore[method-assign]
            gate.release()
            reasons = {(await first.output()).finish_reason, (await second.output()).finish_reason}
            assert reasons == {"error", "length"}

    asyncio.run(main())


def test_a_reader_s_loop_that_is_gone(config: EngineConfig, expected: tuple[int, ...]) -> None:
    engine = AsyncEngine(config)

    async def leave() -> None:
        stream = await engine.submit(PROMPT, LONG)
        await anext(stream)

    async def ask() -> Output:
        await empty(engine)
        assert engine.alive
        output = await engine.generate(PROMPT, GREEDY)
        await engine.close()
        return output

    asyncio.run(leave())
    assert asyncio.run(ask()).token_ids == expected
