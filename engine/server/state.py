"""What a server has: its settings, its engine once that is loaded, and in which phase it is."""

from __future__ import annotations

import asyncio
import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from engine.prompt import Prompt
from engine.request import MAIN
from engine.server.controls import Offer, extras
from engine.server.errors import UNAVAILABLE, ApiError
from engine.server.formats import FORMATS
from engine.server.metrics import Metrics
from engine.server.replies import Served
from engine.server.settings import Settings
from engine.server.shapes import ModelCard
from engine.service import AsyncEngine

log = logging.getLogger(__name__)

Phase = Literal["loading", "ready", "draining", "dead"]

RETRY_SECONDS = 2
"""What Retry-After says."""


def taut_version() -> str:
    try:
        return version("taut")
    except PackageNotFoundError:  # run from its sources
        return "0"


class State:
    """Shared by all requests of one server."""

    def __init__(self, settings: Settings, started: int) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.names[0])
        self.started = started  # seconds since 1970
        self.draining = False
        self._engine: AsyncEngine | None = None
        self._served: Served | None = None
        self._offer: Offer | None = None

    def serve(self, engine: AsyncEngine) -> None:
        """The model is loaded. ValueError: its chat template can't be read."""
        tokenizer, marked = engine.engine.tokenizer, bool(engine.engine.markers.end)
        self._offer = Offer.of(tokenizer, marked, self.settings.efforts)
        self._served = Served(
            tokenizer=tokenizer, fingerprint=f"taut-{taut_version()}", marked=marked
        )
        self._engine = engine
        self.metrics.serve(engine)

    @property
    def phase(self) -> Phase:
        if self.draining:
            return "draining"
        if self._engine is None:
            return "loading"
        return "ready" if self._engine.alive else "dead"

    def check_ready(self) -> None:
        """ApiError 503."""
        if self.phase != "ready":
            raise ApiError(503, UNAVAILABLE[self.phase], retry_after=RETRY_SECONDS)

    @property
    def engine(self) -> AsyncEngine:
        """ApiError 503: none that takes requests."""
        self.check_ready()
        assert self._engine is not None
        return self._engine

    @property
    def served(self) -> Served:
        assert self._served is not None
        return self._served

    @property
    def offer(self) -> Offer:
        assert self._offer is not None
        return self._offer

    def model_name(self, asked: str | None) -> str:
        """What answers call the model. ApiError 404: it isn't served."""
        names = self.settings.names
        if not asked:
            return names[0]
        if asked not in names:
            raise ApiError(
                404,
                f"the model {asked[:80]!r} isn't served; there is {', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return asked

    def card(self, name: str) -> ModelCard:
        """One entry of /v1/models."""
        settings, engine = self.settings, self.engine.engine
        kv = engine.config.models[MAIN].kv
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "taut",
            "root": settings.model,
            "max_model_len": engine.max_model_len,
            "taut": {
                "weights": settings.weights,
                "activations": settings.activations,
                "kv_policy": settings.kv_policy,
                "kv_allocation": settings.kv_allocation,
                "kv_budget": kv.budget_tokens,
                "thinks": self.served.marked,
                "reasoning_efforts": dict(self.offer.efforts) if self.served.marked else {},
                "calls_tools": self.offer.no_tools is None,
                "response_formats": list(FORMATS),
                "controllers": [type(each).__name__ for each in engine.config.controllers],
                "extra_body": extras(self.offer, kv.budget_tokens, allow_full=kv.allow_full),
            },
        }

    async def tokens(self, prompt: Prompt, add_special: bool) -> list[int]:
        """Of a text (with the model's BOS, if `add_special`) or a conversation. ValueError."""
        engine = self.engine.engine
        if isinstance(prompt, str) and not add_special:
            return await asyncio.to_thread(engine.tokenizer.encode, prompt, add_special=False)
        return await asyncio.to_thread(engine.tokens, prompt)

    async def drain(self) -> None:
        """Let what runs end, for `drain_timeout` seconds; then abort it, and stop the engine."""
        self.draining = True
        if self._engine is None:
            return
        try:
            async with asyncio.timeout(self.settings.drain_timeout):
                await self._engine.close()
        except TimeoutError:
            log.warning("not all requests ended in time; they are aborted")
            await self._engine.close(drain=False)
