"""AsyncEngine: every way that a stream can end, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.output import Delta
from engine.request import SamplingParams
from engine.service import AsyncEngine, EngineDead, QueueFull, Stream
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


def test_streams_submits_and_generates(config: EngineConfig, expected: tuple[int, ...]) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            streamed = [delta async for delta in engine.stream(PROMPT, GREEDY)]
            stream = await engine.submit(PROMPT, GREEDY, id="mine", priority=1)
            outputs = await asyncio.gather(
                stream.output(), *(engine.generate(PROMPT, GREEDY) for _ in range(6))
            )
            assert stream.id == outputs[0].id == "mine"
            assert {output.token_ids for output in outputs} == {expected}
            assert tuple(t for delta in streamed for t in delta.token_ids) == expected
            assert streamed[-1].output is not None
            assert [d async for d in stream] == []  # it's over

    asyncio.run(main())


def test_bad_requests_are_refused_at_once(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            for prompt, words in (([], "empty"), ([9999], "vocabulary"), ([1] * 600, "context")):
                with pytest.raises(ValueError, match=words):
                    await engine.submit(prompt)
            with pytest.raises(ValueError, match="stop_token_ids"):
                await engine.generate("Hi", SamplingParams(stop_token_ids=[9999]))
            with pytest.raises(ValueError, match="vocabulary"):
                async for _ in engine.stream([-1]):
                    pass
            assert engine.alive

    asyncio.run(main())


def test_ids_are_taken_while_live(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            gate = Gate(engine)
            first = await engine.submit(PROMPT, GREEDY, id="a")
            with pytest.raises(ValueError, match="'a' is in use"):
                await engine.submit(PROMPT, GREEDY, id="a")
            await gate.wait()
            first.cancel()
            with pytest.raises(ValueError, match="'a' is in use"):  # until the engine let go
                await engine.submit(PROMPT, GREEDY, id="a")
            gate.release()
            await empty(engine)
            again = await engine.submit(PROMPT, GREEDY, id="a")
            assert (await again.output()).finish_reason == "length"

    asyncio.run(main())


def test_the_queue_is_bounded(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config, max_queued=2) as engine:
            gate = Gate(engine)
            streams = [await engine.submit(PROMPT, GREEDY) for _ in range(6)]
            with pytest.raises(QueueFull, match="6 sequences"):
                await engine.submit(PROMPT, GREEDY)
            gate.release()
            outputs = [await stream.output() for stream in streams]
            assert {output.finish_reason for output in outputs} == {"length"}
            assert (await engine.generate(PROMPT, GREEDY)).finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_cancelled_in_the_middle(
    config: EngineConfig, expected: tuple[int, ...], steps: int
) -> None:
    """Inside the first prefill chunk, inside the second, while decoding."""

    async def main() -> None:
        async with serving(config) as engine:
            gate = Gate(engine)
            stream = await engine.submit([*range(100)], LONG)
            for _ in range(steps):
                await gate.wait()
                gate.step()
            await gate.wait()
            stream.cancel()
            stream.cancel()
            gate.release()
            assert [delta async for delta in stream] == []
            with pytest.raises(RuntimeError, match="cancelled"):
                await stream.output()
            assert (await engine.generate(PROMPT, GREEDY)).token_ids == expected

    asyncio.run(main())


def test_cancelled_before_its_start_and_after_its_end(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            gate = Gate(engine)
            blocker = await engine.submit(PROMPT, GREEDY)
            await gate.wait()
            # its command waits behind the step that runs
            unborn = await engine.submit(PROMPT, LONG)
            unborn.cancel()
            queued = [await engine.submit(PROMPT, LONG) for _ in range(5)]
            gate.step()
            await gate.wait()
            for stream in queued:
                stream.cancel()
            gate.release()
            assert (await blocker.output()).finish_reason == "length"
            blocker.cancel()

    asyncio.run(main())


def test_the_reader_s_task_is_cancelled(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            gate = Gate(engine)

            async def read() -> None:
                async for _ in engine.stream(PROMPT, LONG):
                    pass

            tasks = [
                asyncio.create_task(engine.generate(PROMPT, LONG)),
                asyncio.create_task(read()),
            ]
            await gate.wait()
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(each, asyncio.CancelledError) for each in done)
            gate.release()
            # cancelled while its prompt is being prepared
            task = asyncio.create_task(engine.generate(PROMPT, LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_cancel_ends_another_task_s_reading(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            gate = Gate(engine)
            stream = await engine.submit(PROMPT, LONG)

            async def read() -> list[Delta]:
                return [delta async for delta in stream]

            task = asyncio.create_task(read())
            await gate.wait()
            stream.cancel()
            assert await asyncio.wait_for(task, 20) == []
            gate.release()

    asyncio.run(main())


def test_a_generator_that_is_left_early(config: EngineConfig) -> None:
    async def main() -> None:
        async with serving(config) as engine:
            seen = 0
            async for _ in engine.stream(PROMPT, LONG):
                seen += 1
                if seen == 3:
                    break
            stream = engine.stream(PROMPT, LONG)
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await empty(engine)
            ran = engine.stats().scheduler.ran_tokens["main"]
            assert ran < 2 * LONG.max_tokens  # type: ignore[operator]

    asyncio.run(main())


def test_close_drains(config: EngineConfig, expected: tuple[int, ...]) -> None:
    async def main() -> None:
        engine = AsyncEngine(config)
        gate = Gate(engine)
        streams = [await engine.submit(PROMPT, GREEDY) for _ in range(6)]
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0.01)
        assert not engine.alive
        with pytest.raises(EngineDead, match="closed"):
            await engine.submit(PROMPT, GREEDY)
        streams[5].cancel()  # works while draining
        gate.release()
        outputs = [await stream.output() for stream in streams[:5]]
        assert {output.token_ids for output in outputs} == {expected}
        await closing
        await engine.close()
        assert not engine._thread.is_alive()
        assert not engine._live

    asyncio.run(main())


def test_close_aborts(config: EngineConfig) -> None:
    async def main() -> None:
        engine = AsyncEngine(config)
        gate = Gate(engine)
        streams = [await engine.submit(PROMPT, LONG) for _ in range(6)]
        await gate.wait()
        closing = asyncio.create_task(engine.close(drain=False))
        await asyncio.sleep(0.01)
        gate.release()
        outputs = [await stream.output() for stream in streams]
        await closing
        assert {output.finish_reason for output in outputs} == {"abort"}
        assert not engine._live

    asyncio.run(main())


def test_a_block_that_fails_aborts(config: EngineConfig) -> None:
    async def main() -> None:
        streams: list[Stream] = []

        async def block() -> None:
            async with AsyncEngine(config) as engine:
                streams.append(await engine.submit(PROMPT, LONG))
                raise KeyError

        with pytest.raises(KeyError):
            await block()
        assert (await streams[0].output()).finish_reason == "abort"

    asyncio.run(main())


def test_submits_race_with_close(config: EngineConfig) -> None:
    """Whatever comes first, every submit is answered or refused."""

    async def main() -> None:
        engine = AsyncEngine(config)

        async def one() -> str:
            try:
                return (await engine.generate(PROMPT, GREEDY)).finish_reason
            except EngineDead:
                return "refused"

        tasks = [asyncio.create_task(one()) for _ in range(40)]
        await asyncio.sleep(0.02)
        await engine.close()
        async with asyncio.timeout(30):
            assert set(await asyncio.gather(*tasks)) <= {"length", "refused"}

    asyncio.run(main())


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_max_queued_is_checked_first(config: EngineConfig, bad: Any) -> None:
    with pytest.raises(ValueError, match="max_queued"):
        AsyncEngine(config, max_queued=bad)


def test_a_storm(folder: str) -> None:
    """Random arrivals and cancels on a pool that preempts."""
    config = tiny_spec(folder, tokens=192, max_num_seqs=6)
    rng = random.Random(5)

    async def one(engine: AsyncEngine, number: int) -> str:
        params = SamplingParams(
            n=rng.choice((1, 1, 2)), max_tokens=rng.randint(1, 24), seed=number, ignore_eos=True
        )
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 40))]
        wait, delay = rng.random() * 0.8, rng.choice((None, None, 0.0, 0.01, 0.1))
        await asyncio.sleep(wait)
        stream = await engine.submit(prompt, params, priority=rng.randint(0, 2))
        if delay is None:
            return (await stream.output()).finish_reason
        await asyncio.sleep(delay)
        stream.cancel()
        return "cancelled"

    async def main() -> None:
        async with serving(config) as engine, asyncio.timeout(60):
            reasons = await asyncio.gather(*(one(engine, number) for number in range(200)))
            assert set(reasons) <= {"length", "cancelled"}
            assert reasons.count("length") > 50
            assert engine.stats().scheduler.preemptions > 0

    asyncio.run(main())


def test_prepare_beside_the_engine_s_thread(config: EngineConfig) -> None:
    """Validation runs on other threads all the time."""
    with Engine(config) as engine:
        errors: list[BaseException] = []
        over = threading.Event()

        def prepare() -> None:
            try:
                while not over.is_set():
                    engine.prepare("Some text to read", GREEDY)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=prepare) for _ in range(2)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            engine.generate([PROMPT, PROMPT], GREEDY)
        over.set()
        for thread in threads:
            thread.join()
        assert not errors


def _delta(text: str, output: Any = None) -> Delta:
    return Delta(id="a", index=0, text=text, output=output)


def _stream(*items: Any) -> tuple[Stream, list[str]]:
    cancelled: list[str] = []
    stream = Stream("a", 1, cancelled.append)
    for item in items:
        stream._queue.put_nowait(item)
    return stream, cancelled


def test_take_gives_all_that_have_come() -> None:
    async def run() -> None:
        stream, _ = _stream(_delta("a"), _delta("b"))
        assert [each.text for each in await stream.take()] == ["a", "b"]
        stream._queue.put_nowait(_delta("c", output=object()))
        assert [each.text for each in await stream.take()] == ["c"]
        assert await stream.take() == []

    asyncio.run(run())


def test_take_says_what_came_before_the_end() -> None:
    async def run() -> None:
        stream, _ = _stream(_delta("a"), EngineDead("gone"))
        assert [each.text for each in await stream.take()] == ["a"]
        with pytest.raises(EngineDead, match="gone"):
            await stream.take()
        assert await stream.take() == []

    asyncio.run(run())


def test_take_of_a_stream_that_is_cancelled() -> None:
    async def run() -> None:
        stream, cancelled = _stream(_delta("a"))
        stream.cancel()
        assert await stream.take() == []
        assert cancelled == ["a"]
        stream, cancelled = _stream()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert cancelled == ["a"]

    asyncio.run(run())
