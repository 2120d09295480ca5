"""Files of a folder that are JSON, but not what they should be: one error that names the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from engine.build import load_model
from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from tests import tiny

NAN = float("nan")

ODD: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("config.json", {"rms_norm_eps": NAN}, "rms_norm_eps must be a finite"),
    ("config.json", {"rope_theta": 0}, "rope_theta must be above 0"),
    ("config.json", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor must be above"),
    ("tokenizer_config.json", {"eos_token": 5}, "tokenizer_config.json"),
    ("tokenizer_config.json", {"eos_token": {"a": 1}}, "tokenizer_config.json"),
    ("tokenizer_config.json", {"chat_template": 5}, "tokenizer_config.json"),
    ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "tokenizer_config.json"),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "tokenizer_config.json"),
    ("model.safetensors.index.json", {"weight_map": {"model.norm.weight": 5}}, "plain file name"),
)


def _folder(tmp_path: Path, name: str, values: Mapping[str, Any]) -> str:
    folder = tiny.write_folder(tmp_path / "m", tiny.tiny_config(), shards=2)
    data = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data | values))
    return str(folder)


@pytest.mark.parametrize(("name", "values", "words"), ODD, ids=repr)
def test_values_of_a_wrong_kind(
    name: str, values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        load_model("main", ModelSpec(_folder(tmp_path, name, values)), ())


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_json_nested_without_end(name: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path, name, {})
    (Path(folder) / name).write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ValueError, match=f"{name}.* read as JSON"):
        load_model("main", ModelSpec(folder), ())


@pytest.mark.parametrize("values", [{"temperature": -1}, {"top_p": 5}, {"top_k": -2}], ids=repr)
def test_sampling_defaults_that_cant_be_used(values: dict[str, Any], tmp_path: Path) -> None:
    folder = _folder(tmp_path, "generation_config.json", values)

    def open_engine(defaults: bool) -> Engine:
        spec = ModelSpec(folder, generation_defaults=defaults)
        return Engine(EngineConfig(models={"main": spec}, kv_bytes=10_000_000, threads=1))

    with pytest.raises(ValueError, match=f"{next(iter(values))} .* generation_defaults=False"):
        open_engine(True)
    open_engine(False).close()
