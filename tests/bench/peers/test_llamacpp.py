"""Both tools of llama.cpp, played by small programs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers import llamacpp
from bench.peers.llamacpp import BenchRunner, ServerRunner
from bench.peers.peer import PeerError
from tests.bench.peers.fakes import job

SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
if flags["--threads"] == "3":
    sys.exit("error: no such model")

class Handler(BaseHTTPRequestHandler):
    healths = 0
    def do_GET(self):
        Handler.healths += 1
        self.send_response(503 if Handler.healths < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first, wanted = asked["prompt"][0], asked["n_predict"]
        fine = asked["top_k"] == 1 and asked["samplers"] == ["top_k"] and asked["ignore_eos"]
        fine = fine and not asked["cache_prompt"] and self.path == "/completion"
        if first == 666:
            os._exit(1)
        data = json.dumps({"tokens": [first + i for i in range(wanted - (first == 13))]}).encode()
        self.send_response(200 if fine else 400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_): pass

class Server(ThreadingHTTPServer):
    request_queue_size = 64

Server(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""

BENCH = """
import sys, time
flags = dict(zip(sys.argv[1:], sys.argv[2:]))
print("chatter")
if flags["-npp"] == "7":
    print("not enough cells", file=sys.stderr)
    sys.exit(1)
if flags["-npp"] == "8":
    time.sleep(60)
if flags["-npp"] != "9":
    print('{"pp": %(-npp)s, "pl": %(-npl)s, "t_pp": 0.5, "t_tg": 0.01%(-ntg)s}' % flags)
"""

Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    (tmp_path / "VERSION").write_text("0.0.1\n")
    for name, program in (("SERVER", SERVER), ("BENCH", BENCH)):
        path = tmp_path / name
        path.write_text(f"#!{sys.executable} -S\n{program}")
        path.chmod(0o755)
        monkeypatch.setattr(llamacpp, name, path)
    monkeypatch.setattr(llamacpp, "BINARIES", tmp_path)
    made: list[Any] = []

    def runner(kind: type[ServerRunner] | type[BenchRunner], **changes: Any) -> Any:
        made.append(kind(job(tmp_path, **changes)))
        return made[-1]

    yield runner
    for each in made:
        each.close()


def test_the_server_runs_prompts_at_once(make: Make) -> None:
    runner = make(ServerRunner)
    runner.start()
    timing = runner.generate([[5, 6, 7], [50, 60, 70]], 4)
    assert timing.tokens == (5, 6, 7, 8)
    assert timing.seconds > 0
    assert runner.about["versions"] == {"llama-cpp-python": "0.0.1"}
    flags = runner.about["flags"]
    assert flags[flags.index("--parallel") + 1] == "2"
    assert flags[flags.index("--ctx-size") + 1] == "512"  # two streams of 7 tokens and one more
    assert "--model" not in flags
    assert runner.peak_bytes() > 0


@pytest.mark.parametrize(
    ("first", "words"), [(13, "made 3 tokens instead of 4"), (666, "the server broke off")]
)
def test_a_server_that_fails(make: Make, first: int, words: str) -> None:
    runner = make(ServerRunner, streams=1)
    runner.start()
    with pytest.raises(PeerError, match=words):
        runner.generate([[first, 1, 1]], 4)


def test_a_server_that_does_not_start(make: Make) -> None:
    runner = make(ServerRunner, threads=3)
    with pytest.raises(PeerError, match="died while loading: error: no such model"):
        runner.start()


def test_the_bench_tool_times_itself(make: Make) -> None:
    runner = make(BenchRunner)
    runner.start()
    whole = runner.generate([[1, 2, 3]] * 2, 6)
    assert whole == (0.5 + 0.015, 0.5, None)  # the prompt and five steps
    assert runner.generate([[1, 2, 3]] * 2, 1) == (0.5, None, None)
    assert runner.peak_bytes() > 1 << 20


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([0] * 7, "did not end well .*not enough cells"),
        ([0] * 8, "did not end well within 0.5 s"),
        ([0] * 9, "printed 0 results"),
    ],
)
def test_a_bench_tool_that_fails(make: Make, prompt: list[int], words: str) -> None:
    runner = make(BenchRunner, timeout=0.5 if len(prompt) == 8 else 30.0)
    with pytest.raises(PeerError, match=words):
        runner.generate([prompt], 4)


def test_not_installed(make: Make, tmp_path: Path) -> None:
    (tmp_path / "VERSION").unlink()
    for kind in (ServerRunner, BenchRunner):
        with pytest.raises(PeerError, match=r"llama\.cpp isn't installed"):
            make(kind).start()


def test_both_tools_are_raced_and_only_the_server_cold() -> None:
    chosen = llamacpp.PEER.chosen(None)
    assert {each.name for each in chosen if not each.starts_cold} == {
        each.name for each in chosen if each.name.endswith("-bench")
    }
    with pytest.raises(ValueError, match=r"no configuration 'q5'.*q4_0-pure-bench"):
        llamacpp.PEER.chosen("q5")
