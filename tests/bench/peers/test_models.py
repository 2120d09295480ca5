from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.peers import hf_folder, models
from bench.peers.models import Files
from bench.peers.peer import PeerError
from engine.model.checkpoint import open_checkpoint
from engine.model.hf_config import read_config
from engine.model.tensors import tensor_shapes
from engine.model.tokenizer import tokenizer_from_folder, tokenizer_from_gguf
from tests.test_gguf_answers import write_gguf
from tests.tiny import ROPES, tiny_config, tiny_tensors


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_config("qwen2")
    write_gguf(path, config, tiny_tensors(config))
    return path


def test_a_folder_has_the_same_model(file: Path, tmp_path: Path) -> None:
    source = open_checkpoint(str(file))
    hf_folder.write(source, tmp_path / "hf")
    made = open_checkpoint(str(tmp_path / "hf"))
    made.check()
    assert replace(made.config, norm_eps=source.config.norm_eps) == source.config
    assert made.config.norm_eps == pytest.approx(source.config.norm_eps)
    for name, shape in tensor_shapes(source.config).items():
        wanted = source.tensor(name, shape).to(torch.bfloat16)
        assert torch.equal(made.tensor(name, shape), wanted), name
    assert set(made.generation.eos_ids) <= set(source.generation.eos_ids)
    text = "the answer is <think>12, naïvely</think><|im_end|>\n\n"
    assert source.metadata is not None
    ours = tokenizer_from_gguf(source.metadata)
    assert tokenizer_from_folder(tmp_path / "hf").encode(text) == ours.encode(text)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_configs_are_read_back(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    hf_folder._write_json(tmp_path / "config.json", hf_folder.config_json(config, {}))
    assert read_config(tmp_path) == config


def test_what_a_folder_cannot_say_is_refused() -> None:
    for config in (tiny_config("mistral"), tiny_config("llama", rope=ROPES["yarn"])):
        with pytest.raises(ValueError, match="can't be written"):
            hf_folder.config_json(config, {})


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would be run; each makes its output, its last argument but one of llama-quantize's."""
    ran: list[list[str]] = []

    def run(command: list[str]) -> None:
        ran.append([Path(command[0]).name, *command[1:]])
        output = Path(command[-1] if "export" in command else command[-2])
        output.write_text(" ".join(command))

    monkeypatch.setattr(models, "_run", run)
    monkeypatch.setattr(models, "check_installed", lambda name: None)
    return ran


def test_quantised_files_come_from_16_bit_ones(
    file: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    files = Files(str(file), tmp_path)
    path = files.path("gguf-q4_0-pure")
    first, second = commands
    assert first[:3] == ["llama-quantize", "--allow-requantize", str(file)]
    assert first[-1] == "BF16"
    assert second[1:3] == ["--pure", str(tmp_path / "tiny" / "gguf-bf16.gguf")]
    assert second[-1] == "Q4_0"
    assert sorted(each.name for each in path.parent.iterdir()) == [
        "gguf-bf16.gguf",
        "gguf-q4_0-pure.gguf",
    ]
    files.path("gguf-q8_0")
    files.path("gguf-q4_0-pure")
    assert len(commands) == 3  # nothing is made twice


def test_groups_that_divide_the_columns(
    file: Path, tmp_path: Path, commands: list[list[str]]
) -> None:
    Files(str(file), tmp_path).path("openvino-int4")
    (command,) = commands
    assert command[command.index("--group-size") + 1] == "64"  # hidden 64 of the tiny model
    assert command[command.index("--model") + 1] == str(tmp_path / "tiny" / "hf")


def test_half_a_file_is_none(
    file: Path, tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = models._run

    def breaks(command: list[str]) -> None:
        run(command)
        raise PeerError("killed")

    files = Files(str(file), tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(models, "_run", breaks)
        with pytest.raises(PeerError, match="killed"):
            files.path("gguf-bf16")
    assert files.path("gguf-bf16").is_file()
    assert len(commands) == 2


def test_a_tool_that_fails_is_quoted() -> None:
    with pytest.raises(PeerError, match="sh ended with status 3: bad tensor"):
        models._run(["sh", "-c", "echo bad tensor >&2; exit 3"])


def test_names() -> None:
    assert Files("smollm2-135m").name == "smollm2"
    with pytest.raises(ValueError, match="--model nonsense: the race runs smollm2-135m, smollm2"):
        Files("nonsense")
    with pytest.raises(ValueError, match="no such file"):
        Files("nothing.gguf").path("file")
