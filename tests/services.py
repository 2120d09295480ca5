"""An AsyncEngine under test: that it's empty at the end, and a gate inside its model's runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.config import EngineConfig
from engine.request import Batch, SamplingParams, StepOutput
from engine.service import AsyncEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
PROMPT = list(range(40, 60))


@asynccontextmanager
async def serving(config: EngineConfig, **options: Any) -> AsyncIterator[AsyncEngine]:
    """An engine that must be empty again at the end."""
    engine = AsyncEngine(config, **options)
    yield engine
    await empty(engine)
    stats = engine.stats()
    assert (stats.scheduler.running, stats.scheduler.waiting) == (0, 0)
    assert stats.kv["main"].used_pages == 0
    assert not engine._live
    assert not engine.engine._requests
    engine.engine.check()
    await engine.close()
    assert not engine._thread.is_alive()


async def empty(engine: AsyncEngine) -> None:
    async with asyncio.timeout(30):
        while engine._live or engine.engine.has_work():
            await asyncio.sleep(0.005)


class Gate:
    """Holds the engine's thread inside a model's run, so that a test knows where it is."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._executor = engine.engine._executors["main"]
        self._run = self._executor.run
        self._open = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.free = False
        self._executor.run = self._held  # type: ignore[method-assign]

    def _held(self, batch: Batch) -> StepOutput:
        if not self.free:
            self.entered.release()
            assert self._open.acquire(timeout=20)
        return self._run(batch)

    async def wait(self) -> None:
        """Until a run has begun."""
        assert await asyncio.to_thread(self.entered.acquire, True, 20)

    def step(self) -> None:
        self._open.release()

    def release(self) -> None:
        self.free = True
        self._open.release(1000)
