"""What an engine takes where its config is silent: memory, threads, a progress bar."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig, ModelSpec
from engine.build import KV_SHARE
from tests.conftest import MakeEngine
from tests.engines import Model, greedy, prompts
from tests.tiny import tiny_config, write_folder

TOKEN = 2 * 2 * (2 * 16 * 4 + 4)
"""Bytes of a token of the tiny llama: 2 layers of 2 heads, K and V of 16 floats and a position."""


def silent(model: Model, **fields: Any) -> EngineConfig:
    return EngineConfig(models={"main": ModelSpec(str(model.folder))}, **fields)


@pytest.mark.parametrize(
    ("left", "tokens"),
    [
        (1 << 40, 4 * 512),  # what max_num_seqs x max_model_len could use, and no more
        (2 << 20, None),  # a share of what is left
    ],
)
def test_kv_bytes_is_a_share_of_what_is_left(
    left: int, tokens: int | None, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.available_bytes", lambda: left)
    with Engine(silent(tiny_model, max_num_seqs=4, threads=1)) as engine:
        kv = engine.stats().kv["main"]
        assert kv.page_bytes * 2 * 2 == 16 * TOKEN
        share = int((left * KV_SHARE - kv.side_bytes) // TOKEN) // 16 * 16
        assert kv.pages == (tokens or share) // 16 * 2 * 2
        assert KV_SHARE == 0.5  # as EngineConfig and the README say


def test_threads_are_the_usable_cpus(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.engine.usable_cpus", lambda: 3)
    try:
        for threads, expected in ((None, 3), (2, 2)):
            with Engine(silent(tiny_model, threads=threads, kv_bytes=1 << 24)):
                assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(1)


def test_a_progress_bar_on_a_terminal_alone(
    make_engine: MakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    asked = prompts(3)
    engine.generate(asked, greedy(2))
    assert capsys.readouterr() == ("", "")
    engine.generate(asked, greedy(2), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "tokens/s" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    engine.generate(asked, greedy(2))
    assert "3/3" in capsys.readouterr().err
    engine.generate(asked, greedy(2), progress=False)
    engine.generate(asked[:1], greedy(2))
    assert capsys.readouterr().err == ""


LOAD = """
import sys, threading
import torch
from engine.model.checkpoint import open_checkpoint
from engine.model.decoder import Decoder

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
checkpoint = open_checkpoint(sys.argv[1])
before, most, over = anonymous(), 0, threading.Event()

def watch():
    global most
    while not over.wait(0.002):
        most = max(most, anonymous())

watching = threading.Thread(target=watch)
watching.start()
decoder = Decoder.load(checkpoint, dtype=torch.float32, device="cpu")
over.set()
watching.join()
print(decoder.nbytes, most - before, anonymous() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loading_never_holds_two_copies(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Beside the mapped file, which the kernel may drop at any time, the model itself alone."""
    config = tiny_config(hidden_size=512, intermediate_size=1536, layers=10, head_dim=128)
    folder = write_folder(tmp_path_factory.mktemp("large"), config, dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    held, most, after = map(int, done.stdout.split())
    print(f"{held} bytes held, {most} at most, {after} afterwards")
    assert held > 100e6
    # freed pieces of a layer's size stay in the heap; a second copy would make it 2
    assert max(most, after) < 1.6 * held
