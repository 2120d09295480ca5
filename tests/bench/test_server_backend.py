"""The backend for other servers: every spelling of an answer, every way to fail."""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openai", reason="talks to servers through the openai package")

from bench.evaluation import server_backend
from bench.evaluation.backend import Ask, Backend, Sampling
from bench.evaluation.records import Generation, Usage
from bench.evaluation.server_backend import ServerBackend
from engine.build import load_tokenizer
from engine.model.checkpoint import open_checkpoint
from tests.bench.fake_server import MODEL, Reply, Server, completion, said


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(lambda problem: said(problem)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


Connect = Callable[..., ServerBackend]


@pytest.fixture
def connect(server: Server) -> Iterator[Connect]:
    opened: list[ServerBackend] = []

    def make(base_url: str = server.url, model: str = MODEL, **options: Any) -> ServerBackend:
        options = {"concurrency": 2, "timeout": 20.0, **options}
        opened.append(ServerBackend(base_url, model, **options))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


def ask(problem: str, index: int = 0, **params: Any) -> Ask:
    messages = [{"role": "user", "content": problem}]
    sampling = Sampling(**{"max_tokens": 100, **params})
    return Ask(key=("task", problem, index), messages=messages, params=sampling)


def run(backend: Backend, *problems: str) -> dict[str, Generation]:
    done = [(a.key[1], generation) for a, generation in backend.run(map(ask, problems))]
    assert sorted(name for name, _ in done) == sorted(problems)
    return dict(done)


def one(backend: Backend) -> Generation:
    return run(backend, "p")["p"]


SPELLINGS: dict[
    str, tuple[str, str, bool | None, int, dict[str, Any]]
] = {  # thinking, text, closed, thinking tokens of 100; the message
    "content": ("aaaa", "bb", True, 67, {"reasoning_content": "aaaa", "content": "bb"}),
    "vllm": ("aaaa", "bb", True, 67, {"reasoning": "aaaa", "content": "bb"}),
    "both": ("aa", "b", True, 67, {"reasoning": "aa", "reasoning_content": "aa", "content": "b"}),
    "null": ("aa", "b", True, 67, {"reasoning": "aa", "reasoning_content": None, "content": "b"}),
    "inline": ("a" * 20, "b" * 5, True, 50, {"content": f"<think>{'a' * 20}</think>{'b' * 5}"}),
    "opened": ("aaaa", "bbbb", True, 25, {"content": "aaaa</think>bbbb"}),
    "twice": ("aacc", "b", True, 14, {"content": "aa</think>b<think>cc</think>"}),
    "no thought": ("", "42", True, 0, {"content": "<think></think>42"}),
    "plain": ("", r"12 \boxed{1} \boxed{2}", None, 59, {"content": r"12 \boxed{1} \boxed{2}"}),
    "no box": ("", "abc", None, 100, {"content": "abc", "reasoning_content": ""}),
    "nothing": ("", "", None, 100, {"content": None}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_thinking(spelling: str, server: Server, connect: Connect) -> None:
    thinking, text, closed, tokens, message = SPELLINGS[spelling]
    server.script = lambda _: completion(message)
    got = one(connect())
    assert (got.thinking, got.text, got.closed) == (thinking, text, closed)
    assert (got.thinking_tokens, got.answer_tokens, got.output_tokens) == (
        tokens,
        100 - tokens,
        100,
    )
    assert (got.prompt_tokens, got.finish_reason, got.error) == (7, "stop", None)
    assert got.token_ids is None


CUTS: dict[
    str, tuple[bool | None, int, dict[str, Any]]
] = {  # whether the chain was closed, its tokens; the message
    "in the field": (False, 100, {"reasoning": "aaaa", "content": None}),
    "behind the field": (True, 80, {"reasoning": "aaaa", "content": "b"}),
    "in the text": (False, 36, {"content": "<think>aaaa"}),
    "behind the text": (True, 31, {"content": "aaaa</think>b"}),
    "plain": (None, 100, {"content": "aaaa"}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_cut_at_the_limit(cut: str, server: Server, connect: Connect) -> None:
    closed, tokens, message = CUTS[cut]
    server.script = lambda _: completion(message, "length")
    got = one(connect())
    assert (got.finish_reason, got.closed, got.thinking_tokens) == ("length", closed, tokens)


REPORTED: dict[
    str, tuple[int, int | None, dict[str, Any]]
] = {  # thinking tokens; what the server reports, the message
    "a count": (37, 37, {"reasoning": "aaaa", "content": "b"}),
    "a count of hidden thinking": (37, 37, {"content": "b"}),
    "too much": (100, 101, {"reasoning": "aaaa", "content": "b"}),
    "0 though there was some": (80, 0, {"reasoning": "aaaa", "content": "b"}),
    "0 where nothing marks it": (50, 0, {"content": r"seven 7\boxed{"}),
    "0 of none": (0, 0, {"content": "<think></think>42"}),
    "null": (80, None, {"reasoning": "aaaa", "content": "b"}),
}


@pytest.mark.parametrize("case", REPORTED)
def test_counts_of_the_server(case: str, server: Server, connect: Connect) -> None:
    tokens, reported, message = REPORTED[case]
    server.script = lambda _: completion(
        message, completion_tokens_details={"reasoning_tokens": reported}
    )
    got = one(connect())
    assert (got.thinking_tokens, got.answer_tokens) == (tokens, 100 - tokens)


def test_counts_of_a_tokenizer(server: Server, connect: Connect, tiny_folder: Path) -> None:
    encode = load_tokenizer(open_checkpoint(str(tiny_folder))).encode
    backend = connect(tokenizer=str(tiny_folder))
    chain, answer = "the answer is the answer ", r"so \boxed{4}"
    replies = {
        "field": completion({"reasoning": chain, "content": answer}),
        "inline": completion({"content": f"{chain}</think>{answer}"}),
        "plain": said(rf"{chain}\boxed{{4}}"),
        "cut": completion({"reasoning": chain}, "length"),
        "reported": completion(
            {"reasoning": chain}, completion_tokens_details={"reasoning_tokens": 3}
        ),
        "uncounted": completion({"reasoning": chain, "content": answer}, completion_tokens=None),
    }
    server.script = replies.__getitem__
    got = run(backend, *replies)
    tokens = len(encode(chain))
    assert {name: g.thinking_tokens for name, g in got.items()} == {
        "field": tokens,
        "inline": tokens,
        "plain": tokens,
        "cut": 100,
        "reported": 3,
        "uncounted": tokens,
    }
    assert got["field"].token_ids == tuple(encode(chain + answer))
    assert got["inline"].token_ids == tuple(encode(f"{chain}</think>{answer}"))
    assert got["uncounted"].output_tokens == len(encode(chain + answer))
    assert str(tiny_folder) in backend.chain_rule
    assert "ESTIMATED" not in backend.chain_rule
    assert "ESTIMATED" in connect().chain_rule


def test_half_a_surrogate_pair(server: Server, connect: Connect, tiny_folder: Path) -> None:
    server.script = lambda _: said("a\ud83d")
    assert one(connect(tokenizer=str(tiny_folder))).text == "a?"


OPENAI_ERROR = {"error": {"message": "maximum context length is 9", "code": 400}}

FAILURES: dict[str, tuple[Reply, str]] = {
    "openai's": (Reply(400, OPENAI_ERROR), "HTTP 400: maximum context length is 9"),
    "at the top": (Reply(400, {"object": "error", "message": "too long"}), "HTTP 400: too long"),
    "fastapi's": (Reply(422, {"detail": [{"msg": "no such field"}]}), "HTTP 422: .*no such field"),
    "a page": (Reply(200, b"<html>", {"Content-Type": "text/html"}), "no JSON: '<html>'"),
    "half": (Reply(200, b'{"choices": ['), "no JSON"),
    "a list": (Reply(200, []), "no chat completion"),
    "no choice": (Reply(200, {"choices": []}), "no chat completion"),
    "no message": (Reply(200, {"choices": [{"text": "a"}]}), "no chat completion"),
    "no usage": (
        Reply(200, {"choices": [{"message": {"content": "a"}}]}),
        "usage.completion_tokens: give --tokenizer",
    ),
    "its own": (completion({"content": "a"}, "error"), "the server ended it with 'error'"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_its_samples(failure: str, server: Server, connect: Connect) -> None:
    reply, words = FAILURES[failure]
    server.script = lambda problem: reply if problem == "bad" else said(problem)
    got = run(connect(), "a", "bad", "b")
    assert (got["a"].text, got["b"].text) == ("a", "b")
    assert got["bad"].finish_reason == "error"
    assert re.search(words, got["bad"].error or "")
    assert len(server.requests) == 3  # asking again wouldn't help


@pytest.mark.parametrize("failures", [1, 3, 4])
@pytest.mark.parametrize("status", [429, 500, None])
def test_retries(
    failures: int,
    status: int | None,
    server: Server,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    broken = None if status is None else Reply(status, {"error": {"message": "busy"}})
    replies = iter([broken] * failures)
    server.script = lambda problem: next(replies, said(problem))
    got = one(connect())
    assert len(server.requests) == min(failures + 1, 4)
    if failures <= 3:
        assert (got.text, got.error) == ("p", None)
    else:
        words = "Connection error" if status is None else f"HTTP {status}: busy"
        assert (got.text, got.finish_reason) == ("", "error")
        assert words in (got.error or "")


def test_what_is_sent(server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-server")
    params: dict[str, Any] = {
        "temperature": 0.6,
        "top_p": 0.95,
        "seed": 3,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    asks = [ask("p"), ask("p", **params)]
    assert len(list(connect(api_key="mine", concurrency=1).run(asks))) == 2
    messages = [{"role": "user", "content": "p"}]
    bare = {"model": MODEL, "messages": messages, "max_tokens": 100}
    assert server.requests == [bare, {**bare, **params}]
    assert server.keys == {"Bearer mine"}
    one(connect())
    assert "Bearer of-another-server" not in server.keys


def test_asks_are_pulled_as_there_is_room(server: Server, connect: Connect) -> None:
    gate, more = threading.Event(), threading.Semaphore(0)
    pulled: list[str] = []

    def script(problem: str) -> Reply:
        if problem in ("0", "1"):
            assert gate.wait(20)
        return said(problem)

    def asks() -> Iterator[Ask]:
        for number in range(6):
            if number >= 4:  # while two are held, the third thread has room for one
                assert more.acquire(timeout=20)
            pulled.append(str(number))
            yield ask(str(number))

    server.script = script
    results = connect(concurrency=3).run(asks())
    assert pulled == []
    first = [next(results)[0].key[1] for _ in range(2)]
    assert first == ["2", "3"]  # they stream out in the order in which they finish
    assert pulled == ["0", "1", "2", "3"]
    assert len(server.requests) <= 4
    gate.set()
    more.release(2)
    assert sorted(a.key[1] for a, _ in results) == ["0", "1", "4", "5"]


def test_never_more_at_a_time(server: Server, connect: Connect) -> None:
    held, released = threading.Semaphore(0), threading.Semaphore(0)

    def script(problem: str) -> Reply:
        held.release()
        assert released.acquire(timeout=20)
        return said(problem)

    server.script = script
    pulled = itertools.count()
    endless = (ask(str(next(pulled))) for _ in itertools.repeat(None))
    results = connect(concurrency=3).run(endless)
    reader = threading.Thread(target=lambda: [next(results) for _ in range(4)])
    reader.start()
    for under_way in (3, 4, 5, 6, 7):
        while len(server.requests) < under_way:
            assert held.acquire(timeout=20)
        assert len(server.requests) == under_way
        released.release()
    reader.join()
    results.close()  # type: ignore[attr-defined]
    released.release(10)
    for thread in threading.enumerate():
        if thread.name.startswith("ask-"):
            thread.join(20)
    assert next(pulled) <= 5 + 3


def test_a_failing_source_of_asks(server: Server, connect: Connect) -> None:
    def asks() -> Iterator[Ask]:
        yield ask("p")
        raise RuntimeError("no more problems")

    with pytest.raises(RuntimeError, match="no more problems"):
        list(connect().run(asks()))


def test_usage(server: Server, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(server_backend, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def script(problem: str) -> Reply:
        now[0] += 2.0
        return said(problem) if problem != "bad" else Reply(400, OPENAI_ERROR)

    server.script = script
    backend = connect(concurrency=1)
    assert backend.usage() == Usage(ran_tokens={"main": 0})
    got = run(backend, "a", "bad")
    assert {g.seconds for g in got.values()} == {2.0}
    assert backend.usage() == Usage(wall_seconds=4.0, ran_tokens={"main": 107})
    now[0] += 50.0  # not inside a run
    run(backend, "c")
    assert backend.usage() == Usage(wall_seconds=6.0, ran_tokens={"main": 214})


def test_environment(server: Server, connect: Connect) -> None:
    named = {"served_model": MODEL, "server": "fake/1"}
    url = server.url.replace("//", "//user:secret@")
    assert connect(url + "/?key=secret").environment() == {
        "base_url": server.url + "/",
        "server_version": None,
        **named,
    }
    for version, body in (("0.9", {"version": "0.9"}), (None, ["0.9"]), (None, b"0.9{")):
        server.pages["/version"] = Reply(200, body)
        recorded = connect().environment()
        assert recorded == {"base_url": server.url, "server_version": version, **named}


def test_refuses_before_the_work(server: Server, connect: Connect, tmp_path: Path) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("--model 'mine'.*--base-url.*'tiny/model', 'other'", {"model": "mine"}),
        ("--base-url is 'localhost:8000'", {"base_url": "localhost:8000"}),
        ("concurrency is 0", {"concurrency": 0}),
        ("timeout is 0", {"timeout": 0}),
        ("--tokenizer: .*config.json", {"tokenizer": str(tmp_path)}),
    ]
    for words, options in bad:
        with pytest.raises(ValueError, match=words):
            connect(**options)
    assert server.requests == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (Reply(200, {"data": []}), "there are none"),
        (Reply(200, b"<html>"), "no list of models.*<html>.*http://localhost:8000/v1"),
        (Reply(200, {"models": []}), "no list of models"),
        (Reply(401, {"error": {"message": "bad key"}}), "HTTP 401: bad key"),
        (Reply(503, {"error": {"message": "loading"}}), "HTTP 503: loading"),
    ],
)
def test_refuses_a_list_of_models(
    reply: Reply, words: str, server: Server, connect: Connect
) -> None:
    server.pages["/v1/models"] = reply
    with pytest.raises(ValueError, match=f"--base-url.*{words}"):
        connect()


def test_a_server_without_a_list_of_models(server: Server, connect: Connect) -> None:
    del server.pages["/v1/models"]
    assert one(connect(model="any")).text == "p"


def test_no_server(connect: Connect) -> None:
    with socket.socket() as bound:  # taken, and nobody listens
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match=f"--base-url {url}.*refused"):
            connect(url)
