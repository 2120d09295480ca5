"""Hub ids against a stand-in for the hub on this machine; another process has each environment."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import save

from engine import Engine, EngineConfig, ModelSpec, SamplingParams
from engine.model.checkpoint import open_checkpoint
from engine.model.hub import is_id
from tests.model.test_checkpoint import TINY, weights, write_config
from tests.tiny import tiny_config
from tests.tiny import write_folder as write_model_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """One repository, org/tiny, under the addresses that huggingface_hub asks for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path, files = self.path.split("?")[0], self.server.files
        if path.startswith("/api/models/org/tiny/tree/"):
            listing = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in files.items()
            ]
            self.send(json.dumps(listing).encode(), with_body)
        elif path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in files]
            model = {"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            self.send(json.dumps(model).encode(), with_body)
        elif path.startswith("/org/tiny/resolve/"):
            name = path.split("/", 5)[5]
            if with_body:
                self.server.sent.append(name)
            self.send(files[name], with_body)
        else:
            self.send(b"", with_body, 404, {"X-Error-Code": "RepoNotFound"})

    def send(
        self, body: bytes, with_body: bool, status: int = 200, extra: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Length": str(len(body)),
            "ETag": f'"{hashlib.sha1(body).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            **(extra or {}),
        }
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    held = weights(write_config(tmp_path))
    files = {
        "config.json": json.dumps(TINY).encode(),
        "generation_config.json": b'{"eos_token_id": [3, 4]}',
        "model.safetensors": save(held),
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"never wanted",
        "original/consolidated.safetensors": b"never wanted",
        "README.md": b"never wanted",
    }
    server = Hub(files)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(home: Path, endpoint: str, *names: str, **env: str) -> list[str]:
    """What `hub.fetch` gives or says for each name, in a process with this environment."""
    code = (
        "import sys\n"
        "from engine.model import hub\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(hub.fetch(name))\n"
        "    except ValueError as e: print('refused:', e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_only_the_files_that_are_read_are_brought(hub: Hub, tmp_path: Path) -> None:
    folder, gone = fetch(tmp_path, hub.url, "org/tiny", "org/gone")
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(hub.sent) == wanted
    found = open_checkpoint(folder)
    found.check()
    assert found.generation.eos_ids == (3, 4)
    assert found.tensor("model.norm.weight", (32,)).dtype == torch.bfloat16
    assert gone.startswith("refused: model 'org/gone': there is no such folder here")
    assert "RepositoryNotFound" in gone


def test_a_cached_model_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    (folder,) = fetch(tmp_path, hub.url, "org/tiny")
    offline = fetch(tmp_path, hub.url, "org/tiny", "org/other", HF_HUB_OFFLINE="1")
    assert offline[0] == folder
    assert offline[1].startswith("refused: model 'org/other'")
    assert "HF_HUB_OFFLINE" in offline[1] or "offline" in offline[1].lower()
    unreachable = fetch(tmp_path, "http://127.0.0.1:9", "org/tiny", "org/other")
    assert unreachable[0] == folder
    assert "org/other" in unreachable[1]
    assert "onnect" in unreachable[1]


def taut(home: Path, endpoint: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`taut generate` with a hub id, in a process with this environment."""
    command = [sys.executable, "-m", "engine.cli", "generate", "--no-chat", "--model", "org/tiny"]
    return subprocess.run(
        [*command, "--temperature", "0", "--max-tokens", "6", "The quick"],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_command_brings_a_model_of_several_shards(hub: Hub, tmp_path: Path) -> None:
    """With the hub's progress bar; a second time without the network; a shard that isn't there."""
    folder = write_model_folder(tmp_path / "model", tiny_config(), shards=2)
    hub.files = {file.name: file.read_bytes() for file in folder.iterdir()}
    first = taut(tmp_path / "home", hub.url)
    assert first.returncode == 0, first.stderr
    assert "%|" in first.stderr
    offline = taut(tmp_path / "home", "http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    with Engine(EngineConfig(models={"main": ModelSpec(str(folder))}, threads=1)) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = engine.generate("The quick", params)
    assert first.stdout == offline.stdout == f"{output.text}\n"
    del hub.files["model-00002-of-00002.safetensors"]
    lost = taut(tmp_path / "other", hub.url)
    assert (lost.returncode, lost.stdout) == (2, "")
    assert "model-00002-of-00002.safetensors: this file of weights is missing" in lost.stderr


def test_ids() -> None:
    assert is_id("Qwen/Qwen3-0.6B")
    assert not any(map(is_id, ["smollm3", "./org/name", "/org/name", "a/b/c", "org/", "../name"]))
