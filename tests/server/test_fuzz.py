"""Malformed bodies beside a stream, and what the OpenAPI document allows."""

from __future__ import annotations

import os
import random
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode, checks

from engine.config import EngineConfig
from tests.server.live import Live, serving
from tests.server.malformed import malformed
from tests.server.sockets import open_stream

SAID = "the stream goes on as if nothing were. " * 5


def test_malformed_bodies_leave_a_stream_untouched(live: Live) -> None:
    live.says(SAID)
    live.pace(0.005)
    over = threading.Event()
    failures: list[BaseException] = []
    sent = [0, 0, 0]

    def fuzz(number: int) -> None:
        choose = random.Random(number)
        with httpx.Client(base_url=live.url, timeout=30) as client:
            try:
                while not over.is_set():
                    bad = malformed(choose)
                    bad.check(client.post(bad.path, content=bad.data, headers=bad.headers))
                    sent[number] += 1
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=fuzz, args=(number,)) for number in range(len(sent))]
    for thread in threads:
        thread.start()
    try:
        with open_stream(live, max_tokens=400) as stream:
            chunks = stream.read_all()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    assert min(sent) > 5
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == SAID
    assert choices[-1]["finish_reason"] == "stop"
    assert live.metric("taut:request_errors_total", status="500") == 0


MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
FEW = int(os.environ.get("TAUT_FUZZ_EXAMPLES", "4"))  # bodies a route and mode
CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)
"""Not whether a good body is answered: ranges of numbers are the engine's, not the document's."""


def test_the_document_is_true(config: EngineConfig) -> None:
    """No 5xx, no answer of another shape than it says, errors included."""
    with serving(replace(config, max_model_len=48)) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
        asked = 0
        for found in schema.get_all_operations():
            for mode in MODES:
                asked += ask(found.ok(), mode)  # type: ignore[union-attr]
        assert asked > 2 * FEW


def ask(operation: Any, mode: GenerationMode) -> int:
    asked = 0

    @seeded(0)
    @settings(
        max_examples=FEW,
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        nonlocal asked
        asked += 1
        case.validate_response(case.call(timeout=30), checks=CHECKS)

    with suppress(Unsatisfiable):
        one()
    return asked
