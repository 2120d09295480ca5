"""Flags, files, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.options import options_of
from engine.scheduler.controllers.loop_guard import LoopGuard
from engine.server.flags import parse
from engine.server.settings import Settings

VALUES: dict[str, Any] = {
    "model": "some/model",
    "served_model_name": ["a", "b"],
    "weights": "int8",
    "activations": "int16",
    "dtype": "bfloat16",
    "max_model_len": 100,
    "generation_defaults": False,
    "kv_policy": "snapkv",
    "kv_allocation": "adakv",
    "kv_budget": 64,
    "kv_budget_bytes": 4096,
    "kv_format": "int4",
    "kv_tail": 32,
    "kv_tail_format": "fp32",
    "kv_window": 32,
    "kv_allow_full": True,
    "loop_guard": False,
    "reasoning_efforts": "low=7",
    "kv_cache_memory_bytes": 10**9,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 77,
    "max_queued": 5,
    "threads": 2,
    "seed": 1,
    "host": "0.0.0.0",
    "port": 9,
    "api_key": ["k"],
    "allowed_origins": ["*"],
    "ssl_certfile": "c.pem",
    "ssl_keyfile": "k.pem",
    "access_log": True,
    "ping_interval": 1.5,
    "request_timeout": 2.5,
    "drain_timeout": 3.5,
    "max_prompt_tokens": 50,
    "max_body_bytes": 60,
    "max_header_bytes": 70,
}


def as_flags(values: dict[str, Any]) -> list[str]:
    args = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if name == "model":
            args.append(value)
        elif isinstance(value, bool):
            args.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            for each in value if isinstance(value, list) else [value]:
                args += [flag, str(each)]
    return args


def as_toml(values: dict[str, Any]) -> str:
    return "".join(
        f"{name.replace('_', '-')} = {str(value).lower() if isinstance(value, bool) else value!r}\n"
        for name, value in values.items()
    )


def as_yaml(values: dict[str, Any]) -> str:
    return "".join(f"{name}: {value!r}\n" for name, value in values.items())


def test_every_setting_from_everywhere(tmp_path: Path) -> None:
    options = list(options_of(Settings))
    assert set(VALUES) == {option.name for option in options}
    expected = Settings(**VALUES)
    assert all(getattr(expected, option.name) != option.default for option in options)
    assert parse(as_flags(VALUES)) == expected
    for name, text in (("a.toml", as_toml(VALUES)), ("a.yaml", as_yaml(VALUES))):
        (tmp_path / name).write_text(text)
        assert parse(["--config", str(tmp_path / name)]) == expected


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text("port: 1\nkv-window: 16\n")
    settings = parse(["m", "--config", str(file), "--port", "2"])
    assert (settings.port, settings.kv_window, settings.model) == (2, 16, "m")


def test_a_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAUT_API_KEY", "from-there")
    assert parse([]).api_key == ("from-there",)
    assert parse(["--api-key", "own"]).api_key == ("own",)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--port", "hot"], "--port: .*integer"),
        (["--port", "70000"], "--port: "),
        (["--max-queued", "-1"], "--max-queued: "),
        (["--request-timeout", "nan"], "--request-timeout: "),
        (["--api-key", ""], "--api-key: .*empty"),
        (["--max-num"], "--max-num"),
        (["--nothing", "1"], "--nothing"),
        (["a", "b"], "b"),
        (["--config", "a.ini"], "a.ini: must be"),
        (["--reasoning-efforts", "low"], "--reasoning-efforts: .*low=512"),
    ],
)
def test_bad_flags(args: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(args)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "prot = 1", "prot: there is no such setting"),
        ("a.toml", "port = ", "a.toml: "),
        ("a.yaml", "port: [", "a.yaml: "),
        ("a.yaml", "- 1", "a.yaml: must hold names"),
        ("a.yaml", "port: hot", "a.yaml: port: "),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "a.yaml: "),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        parse(["--config", str(tmp_path / name)])


def test_a_wrong_key_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("api_key: {secret: 1}")
    with pytest.raises(ValueError, match="api_key") as caught:
        parse(["--config", str(file)])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--kv-policy", "snapkv"], "--kv-budget"),
        (["--kv-policy", "nothing", "--kv-budget", "64"], "nothing"),
        (["--weights", "int3"], "int3"),
        (["--activations", "int3"], "int3"),
        (["--dtype", "float16"], "float16"),
        (["--kv-allocation", "adakv"], "needs a policy"),
        (["--threads", "0"], "threads"),
        (["--ssl-keyfile", "k.pem"], "--ssl-certfile"),
        (["--ssl-keyfile", "k.pem", "--ssl-certfile", "c.pem"], "--ssl-certfile c.pem"),
    ],
)
def test_what_the_engine_refuses(args: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(args).engine_config()


def test_the_engine_s_config() -> None:
    config = parse(["m", "--kv-policy", "snapkv", "--kv-budget", "64", "--max-num-seqs", "300"])
    made = config.engine_config()
    assert made.models["main"].kv.budget_tokens == 64
    assert made.max_batched_tokens == 600
    assert made.controllers == (LoopGuard(),)
    assert not made.models["main"].kv.allow_full
    assert config.names == ("m",)
    assert config.efforts["low"] == 1024
    bare = parse(["--no-loop-guard", "--reasoning-efforts", "low=7,medium=none"])
    assert bare.engine_config().controllers == ()
    assert (bare.efforts["low"], bare.efforts["medium"], bare.efforts["high"]) == (7, None, 16384)
    allowing = ["--kv-policy", "snapkv", "--kv-budget", "64", "--kv-allow-full"]
    kv = parse([*allowing, "--kv-allocation", "adakv"]).engine_config().models["main"].kv
    assert kv.allow_full
    assert type(kv.allocation).__name__ == "AdaKV"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(["--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 70
    for option in options_of(Settings):
        assert option.name == "model" or f"--{option.name.replace('_', '-')}" in text
        assert f"{option.words.group}:" in text
