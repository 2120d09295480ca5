"""The load generator on a server whose every piece and pause is known."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.load import CHAT, Answer, Ask, Load, Target, put, waits_between
from tests.bench.scripted_server import DONE, Script, event, scripted, text, usage

PAUSE = 0.05


def loaded(script: Script, count: int = 1, *, fields: Any = None, **options: Any) -> Load:
    with scripted(script) as server:
        target = Target(base_url=server.url, model="m", timeout=2.0, fields=fields or {})
        return asyncio.run(put(target, [Ask("a b", 5)] * count, **options))


def answer_to(*parts: float | bytes) -> Answer:
    (answer,) = loaded(lambda body: list(parts)).answers
    return answer


def test_times_and_tokens_of_an_answer() -> None:
    pieces = (PAUSE, text("one"), 2 * PAUSE, text("two three"), PAUSE, text("four"))
    answer = answer_to(*pieces, usage(7, 9), PAUSE, DONE)
    assert answer.error is None
    assert (answer.input_tokens, answer.output_tokens) == (7, 9)
    assert PAUSE <= answer.first < 2 * PAUSE + 0.5
    assert len(answer.gaps) == 2
    assert answer.gaps[0] > 1.2 * PAUSE
    assert answer.last == pytest.approx(answer.first + sum(answer.gaps))


def test_only_text_is_a_piece() -> None:
    """Not a role, a comment, an end, or usage that comes with each chunk."""
    role = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
    thought = event(choices=[{"index": 0, "delta": {"reasoning_content": "so"}}])
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}], usage=None)
    answer = answer_to(role, b": ping\n\n", PAUSE, thought, PAUSE, end, usage(1, 1), DONE)
    assert answer.error is None
    assert answer.gaps == ()
    assert answer.first >= PAUSE


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([text("a"), DONE], "no usage"),
        ([usage(1, 1), DONE], "no text"),
        ([text("a"), usage(1, 1)], "without [DONE]"),
        ([text("a"), event(error={"message": "it broke"}), DONE], "it broke"),
        ([b"data: {\n\n", DONE], "JSONDecodeError"),
        ([text("a"), 5.0], "within 2 s"),
    ],
)
def test_an_answer_that_is_none(parts: list[float | bytes], words: str) -> None:
    assert words in (answer_to(*parts).error or "")


def test_a_refusal_and_nobody_there() -> None:
    (answer,) = loaded(lambda body: (429, b'{"error":{"message":"full"}}')).answers
    assert answer.error == 'BadAnswer: status 429: {"error":{"message":"full"}}'
    target = Target(base_url="http://127.0.0.1:9", model="m")
    (answer,) = asyncio.run(put(target, [Ask("a", 1)])).answers
    assert "Connect" in (answer.error or "")


def good(body: dict[str, Any]) -> list[float | bytes]:
    return [PAUSE, text("a"), usage(3, 1), DONE]


@pytest.mark.parametrize(("limit", "most"), [(2, 2), (None, 6)])
def test_as_many_at_once_as_allowed(limit: int | None, most: int) -> None:
    """The server answers when so many are there."""
    together = threading.Barrier(most)

    def script(body: dict[str, Any]) -> list[float | bytes]:
        together.wait(10)
        return good(body)

    with scripted(script) as server:
        target = Target(base_url=server.url, model="m")
        load = asyncio.run(put(target, [Ask("a", 1)] * 6, max_concurrency=limit))
    assert server.most == most
    assert not any(answer.error for answer in load.answers)


def test_a_rate() -> None:
    """Ten at 40 a second: at distances that differ, and the same ones again for the same seed."""
    load = loaded(good, 10, request_rate=40.0, seed=3)
    assert load.seconds > 0.1
    waits = list(waits_between(40.0, 2000, seed=3))
    assert waits == list(waits_between(40.0, 2000, seed=3))
    assert len(set(waits)) == 2000
    assert sum(waits) == pytest.approx(2000 / 40, rel=0.1)


def test_bodies() -> None:
    target = Target(base_url="", model="m", fields={"ignore_eos": True})
    body = target.body(Ask([1, 2], 9))
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 9, True)
    assert body["stream_options"] == {"include_usage": True}
    body = Target(base_url="", model="m", endpoint=CHAT).body(Ask("x", 9))
    assert body["messages"] == [{"role": "user", "content": "x"}]
    assert body["max_completion_tokens"] == 9


def test_figures() -> None:
    answers = [
        Answer(0.1, 0.5, (0.1, 0.3), 10, 5),
        Answer(0.3, 0.3, (), 10, 1),
        Answer(error="no"),
    ]
    values = serve.figures(Load(answers, 2.0))
    assert (values["completed"], values["failed"]) == (2, 1)
    assert values["request_throughput"] == 1.0
    assert values["output_throughput"] == 3.0
    assert values["total_token_throughput"] == 13.0
    assert values["mean_ttft_ms"] == pytest.approx(200)
    assert values["median_itl_ms"] == pytest.approx(200)
    assert values["mean_tpot_ms"] == pytest.approx(100)
    assert values["p99_e2el_ms"] == pytest.approx(498)


def test_nothing_to_measure() -> None:
    values = serve.figures(Load([Answer(error="no")], 1.0))
    assert values["mean_ttft_ms"] is None
    assert "-" in serve.table(values)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "result.json"
    with scripted(good) as server:
        flags = ["--base-url", f"{server.url}/v1/", "--model", "m", "--api-key", "k"]
        flags += ["--num-prompts", "5", "--random-input-len", "20", "--random-range-ratio", "0.5"]
        serve.main([*flags, "--ignore-eos", "--save-result", str(saved), "--save-detailed"])
    assert set(server.keys) == {"Bearer k"}
    assert set(server.paths) == {"/v1/completions"}
    prompts = [body["prompt"] for body in server.bodies[1:]]
    assert len(set(prompts)) == 5
    assert {10 <= len(prompt.split()) <= 30 for prompt in prompts} == {True}
    result = json.loads(saved.read_text())
    assert (result["completed"], result["failed"], result["request_rate"]) == (5, 0, "inf")
    assert len(result["ttfts"]) == 5
    assert all(math.isfinite(each) for each in result["ttfts"])
    assert "Successful requests       5" in capsys.readouterr().out


def test_a_server_that_refuses_is_told_at_once() -> None:
    with (
        scripted(lambda body: (404, b"no such model")) as server,
        pytest.raises(SystemExit, match="no such model"),
    ):
        serve.main(["--base-url", server.url, "--model", "m"])


@pytest.mark.parametrize(
    "flags", [["--num-prompts", "0"], ["--request-rate", "-1"], ["--random-range-ratio", "1"]]
)
def test_bad_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit):
        serve.arguments(["--model", "m", *flags])
