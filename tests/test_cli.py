"""The command `taut`, in this process: what it writes, and what it refuses."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from engine import cli
from engine.engine import Engine
from engine.output import Delta
from engine.request import SamplingParams
from tests.scripted import letters, saying, script_engine, tiny_folder
from tests.tiny import tiny_checkpoint, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def taut(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on the tiny model; `stdin` is what is typed."""
    monkeypatch.setattr("engine.engine.usable_cpus", lambda: 1)  # more would wait for each other

    def run(command: str, *args: str, stdin: str = "", model: str | None = folder) -> Done:
        named = [] if model is None else ["--model", model]
        monkeypatch.setattr(sys, "argv", ["taut", command, *named, *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(exit.value.code, int)
        return Done(exit.value.code, out, err)

    return run


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on every new engine's model answers so, whatever the prompt."""

    def script(text: str) -> None:
        prepare = Engine.prepare

        def scripted(engine: Engine, prompt: Any, params: SamplingParams, **rest: Any) -> Any:
            request = prepare(engine, prompt, params, **rest)
            parts = text.replace("</think>", "\0</think>\0").split("\0")
            special = engine.tokenizer.token_id("</think>")
            tokens: list[int] = []
            for part in parts:
                if part == "</think>":
                    assert special is not None
                    tokens.append(special)
                else:
                    tokens += letters(engine.tokenizer, part)
            end = engine.tokenizer.token_id("<|im_end|>")
            assert end is not None
            script_engine(engine, saying(request.choices[0].prompt_len, tokens, end))
            return request

        monkeypatch.setattr(Engine, "prepare", scripted)

    return script


HARD = "a\tb  [bold]c[/bold] :smile: \x1b[1m \\[ 数🎈\n\n" + "long " * 24 + "\r\n end \n"


def test_a_pipe_gets_the_text_and_a_newline(taut: Run, says: Callable[[str], None]) -> None:
    says(HARD)
    assert taut("generate", "--max-tokens", "500", "Hi") == (0, HARD + "\n", "")
    assert taut("generate", "--max-tokens", "400", "--n", "2", "Hi").out == (HARD + "\n") * 2
    assert taut("generate", "--max-tokens", "400", "Hi", "Yo").out == (HARD + "\n") * 2


def test_thinking_stays_out_of_a_pipe(taut: Run, says: Callable[[str], None]) -> None:
    says("a plan</think>42")
    done = taut("generate", "--no-chat", "Hi<think>\n")
    assert done.out == "42\n"
    assert "a plan" in done.err
    done = taut(
        "generate", "--no-chat", "--thinking-budget", "3", "--max-tokens", "200", "Hi<think>\n"
    )
    assert done.err.startswith("a p\n\nThat is enough thinking")


def test_a_terminal_shows_thinking_dim(
    taut: Run, says: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    says("plan</think>42 [b]")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = taut("generate", "--no-chat", "Hi<think>\n")
    assert "\x1b[2mp\x1b[0m" in done.out
    assert done.out.endswith("42 [b]\n")
    assert done.err == ""


def test_options_reach_the_engine(taut: Run, says: Callable[[str], None]) -> None:
    says("one stop two")
    assert taut("generate", "--stop", "stop", "--stop", "x", "Hi").out == "one \n"
    assert taut("generate", "--max-tokens", "3", "Hi").out == "one\n"
    said = taut("generate", "--max-tokens", "20", "--ignore-eos", "--n", "1", "Hi")
    assert said.out == "one stop two\n"  # ends of sequence behind it, which are no text


def test_prompts_from_stdin(taut: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stream = Engine.stream

    def listening(engine: Engine, prompt: Any, params: SamplingParams) -> Iterator[Delta]:
        seen.append(prompt)
        return stream(engine, prompt, params)

    monkeypatch.setattr(Engine, "stream", listening)
    assert taut("generate", "--max-tokens", "2", "-", stdin="Once\nmore\n").code == 0
    assert taut("generate", "--max-tokens", "2", "--no-chat", "Hi").code == 0
    assert seen == [[{"role": "user", "content": "Once\nmore"}], "Hi"]


def test_a_model_without_a_template_continues(
    taut: Run, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = shutil.copytree(folder, tmp_path / "bare")
    told = json.loads((bare / "tokenizer_config.json").read_text())
    del told["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(told))
    seen: list[Any] = []
    stream = Engine.stream

    def listening(engine: Engine, prompt: Any, params: SamplingParams) -> Iterator[Delta]:
        seen.append(prompt)
        return stream(engine, prompt, params)

    monkeypatch.setattr(Engine, "stream", listening)
    assert taut("generate", "--max-tokens", "2", "Hi", model=str(bare)).code == 0
    assert seen == ["Hi"]
    assert "no chat template" in taut("generate", "--chat", "Hi", model=str(bare)).err


def test_the_same_seed_writes_the_same(taut: Run) -> None:
    args = ("--seed", "3", "--max-tokens", "8", "--n", "2", "--kv-policy", "snapkv(queries=2)")
    first = taut("generate", *args, "--kv-budget", "16", "--kv-window", "8", "Hi")
    assert first.code == 0
    assert taut("generate", *args, "--kv-budget", "16", "--kv-window", "8", "Hi") == first


def test_chat(taut: Run, says: Callable[[str], None]) -> None:
    says("plan</think>42")
    done = taut("chat", stdin="Hi\n\nAnd now?\n/new\nHi\n")
    # the template doesn't open the thinking: without the start marker all of it is the answer
    assert done.out == "plan42\n" * 3
    assert "/new starts afresh" in done.err
    assert taut("chat", "--system", "Be short.", stdin="/exit\nHi\n").out == ""


def test_chat_remembers_and_forgets(taut: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    stream = Engine.stream

    def listening(engine: Engine, prompt: Any, params: SamplingParams) -> Iterator[Delta]:
        seen.append([message["role"] for message in prompt])
        if prompt[-1]["content"] == "stop":
            raise KeyboardInterrupt
        return stream(engine, prompt, params)

    monkeypatch.setattr(Engine, "stream", listening)
    typed = f"Hi\nstop\n{'x' * 600}\nYo\n/new\nHi\n"
    done = taut("chat", "--system", "Be short.", "--max-tokens", "2", stdin=typed)
    assert done.code == 0
    one, two = ["system", "user"], ["system", "user", "assistant", "user"]
    assert seen == [one, two, two, two, one]
    assert "[stopped]" in done.err
    assert "maximum context length" in done.err
    assert "cut at its length limit" in done.err


def test_demo_says_what_is_right(taut: Run, says: Callable[[str], None]) -> None:
    says(" 8\n")
    asked = ("--question", "a=3 b=5; loop 1: a:a+b; a?", "--question", "k=4 d:k+3; d k?")
    done = taut("demo", *asked)
    assert (done.code, done.out) == (0, " 8\n\n" * 2)
    lines = done.err.splitlines()
    assert lines[0] == "> a=3 b=5; loop 1: a:a+b; a?"
    assert lines[1].startswith("right: 4 tokens in ")
    assert lines[4].startswith("wrong, it is 7 4: 4 tokens in ")
    done = taut("demo", "--question", "How are you?")
    assert (done.code, done.out) == (2, "")
    assert "isn't a question that the abacus knows: 'a=3 b=5;" in done.err


def test_info(taut: Run, folder: str) -> None:
    done = taut("info")
    assert (done.code, done.err) == (0, "")
    for words in (
        "attention ",
        "reference ",
        f"model              {folder}",
        "llama, 2 layers, hidden 64, 4 query and 2 kv heads of 16, vocabulary 304",
        "<|im_end|>",
        "temperature=0.6",
        "full cache",
    ):
        assert words in done.out
    assert "float: as stored; activations in float32" in done.out
    done = taut("info", "--weights", "int8", "--activations", "int16", "--threads", "1")
    assert "activations in float32, rounded to int16" in done.out
    assert "needs weights int8 or nvfp4" in taut("info", "--activations", "int8").err
    done = taut("info", "--weights", "rtn4", "--dtype", "bfloat16")
    assert "rtn4: floats rounded to 4 bits; activations in bfloat16" in done.out
    done = taut("info", "--kv-policy", "snapkv", "--kv-budget", "64", "--no-generation-defaults")
    assert "SnapKV" in done.out
    assert "budget 64" in done.out
    assert "switched off" in done.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("",), "the prompt is empty"),
        (("-",), "the prompt is empty"),
        (("-", "-"), "only once"),
        (("--n", "0", "Hi"), "n must be from 1"),
        (("--max-tokens", "none", "Hi"), "--max-tokens"),
        (("--temperature", "-1", "Hi"), "temperature must be from 0"),
        (("--top-p", "2", "Hi"), "top_p must be above 0"),
        (("--stop", "", "Hi"), "stop must hold non-empty strings"),
        (("--thinking-budget", "-1", "Hi"), "thinking_token_budget must be at least 0"),
        (("--dtype", "int8", "Hi"), "dtype must be auto, float32 or bfloat16"),
        (("--weights", "rtn9", "Hi"), "weights must be one of float, bf16"),
        (("--max-model-len", "100000", "Hi"), "above the model's own 512"),
        (("--kv-policy", "vse(sinks=4)", "--kv-budget", "64", "Hi"), "no KV policy 'vse'"),
        (("--kv-policy", "kara()", "--kv-budget", "128", "Hi"), "window of 128 keeps all"),
        (("--kv-allocation", "adakv()", "Hi"), "needs a policy"),
        (("--kv-policy", "snapkv(sinks=99)", "--kv-budget", "64", "Hi"), "99 sinks"),
        (("--kv-policy", "snapkv", "Hi"), "--kv-policy needs --kv-budget"),
        (("--kv-budget", "64", "Hi"), "needs a policy"),
        (("--bogus", "Hi"), "--bogus"),
        ((), "PROMPTS"),
    ],
)
def test_refusals_are_one_line(taut: Run, args: tuple[str, ...], words: str) -> None:
    done = taut("generate", *args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("taut: ")
    assert done.err.count("\n") == 1
    assert words in done.err


POLICIES = ["rkv()", "h2o()", "tova()", "knorm()", "keydiff()", "kara()", "vase(variant='dkv')"]


@pytest.mark.parametrize("policy", ["sinks_recent()", "snapkv()", "vase()", *POLICIES])
def test_every_policy_generates(taut: Run, policy: str) -> None:
    sizes = ("--kv-budget", "8", "--kv-window", "12", "--kv-allocation", "adakv(safe=0.5)")
    limits = ("--max-tokens", "60", "--ignore-eos", "--temperature", "0", "--max-model-len", "128")
    assert taut("generate", "--kv-policy", policy, *sizes, *limits, "Hi there").code == 0


def test_a_profile_is_measured_and_used(taut: Run, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "other")
    args = ("--kv-policy", "rkv", "--kv-budget", "6400", "--kv-allocation", "reasonalloc()")
    done = taut("info", *args, model=model)
    assert done.code == 2
    assert "taut calibrate kv-wave" in done.err
    prompts = tmp_path / "prompts.json"
    prompts.write_text('["one and one", "the sum of the words is even"]')
    done = taut("calibrate", "kv-wave", model, "--prompts", str(prompts), model=None)
    assert done.code == 0
    assert done.out.endswith(f"{tmp_path / 'other.kv-wave.json'}\n")
    done = taut("info", *args, model=model)
    assert "cells a head by layer: " in " ".join(done.out.split())
    done = taut("calibrate", "kv-wave", model, "--coverage", "2", model=None)
    assert (done.code, done.out) == (2, "")


def test_unknown_models_and_commands(taut: Run, tmp_path: Path) -> None:
    for model, words in (
        ("nope", "none of: a packaged model (abacus, "),
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "a.gguf"), "no such file"),
    ):
        for command in (("generate", "Hi"), ("info",), ("chat",)):
            done = taut(*command, model=model)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
            assert words in done.err
    done = taut("sing", model=None)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


def test_an_error_while_generating(taut: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("engine.executor.Executor.run", fail)
    for prompts in (("Hi",), ("Hi", "Yo")):
        done = taut("generate", *prompts)
        assert done.code == 1
        assert done.out == "\n" * len(prompts)
        assert "taut: the model failed: RuntimeError: broken\n" in done.err


def test_an_interrupt_ends_quietly(taut: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("engine.executor.Executor.run", interrupt)
    assert taut("generate", "Hi") == (130, "\n", "")


def test_help_is_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for argv in (["taut"], ["taut", "--help"]):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit:
            cli.main()
        assert exit.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert len(shown[0].splitlines()) < 20
    assert "..." not in shown[0].split("Commands:")[1]


def test_as_a_process(folder: str) -> None:
    command = [sys.executable, "-m", "engine.cli", "generate", "--model", folder]
    options = ["--no-chat", "--temperature", "0", "--max-tokens", "6", "The quick"]
    done = subprocess.run([*command, *options], capture_output=True, check=True, timeout=120)
    with Engine(folder) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = engine.generate("The quick", params)
    assert done.stdout == output.text.encode() + b"\n"
    assert done.stderr == b""


def test_quantize_writes_a_folder_that_runs(taut: Run, tmp_path: Path) -> None:
    tiny = tiny_checkpoint("llama", intermediate_size=144)
    source = str(write_folder(tmp_path / "source", tiny.config, tiny.tensors))
    out = str(tmp_path / "out")
    done = taut("quantize", source, "--out", out, "--scale", "mse", model=None)
    assert done.code == 0
    assert done.out.startswith(f"{out}: 0.0 MB of weights in NVFP4, and 0.1 MB of ")
    told = taut("info", model=out).out
    assert "float: as stored (nvfp4)" in " ".join(told.split())
    assert taut("generate", "--max-tokens", "3", "Hi", model=out).code == 0
    assert taut("generate", "--weights", "int8", "--max-tokens", "3", "Hi", model=source).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "int4"), "--format must be nvfp4, not 'int4'"),
        (("--scale", "best"), "--scale must be one of max, mse, not 'best'"),
    ],
)
def test_quantize_refuses_in_words(
    taut: Run, folder: str, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    done = taut("quantize", folder, "--out", str(tmp_path / "out"), *options, model=None)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_bits_are_chosen_and_used(taut: Run, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "third")
    problems = tmp_path / "problems.jsonl"
    problems.write_text('{"question": "1 + 1?", "answer": 2}\n{"question": "3?", "answer": 3}\n')
    asked = ("--budget-bytes", "20000", "--problems", str(problems), "--max-tokens", "5")
    done = taut("calibrate", "kv-bits", model, *asked, "--threads", "1", model=None)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()[:4]] == [
        "bf16",
        "int8",
        "int4",
        "int2",
    ]
    assert done.out.endswith(f"bf16, written to {tmp_path / 'third.kv-bits.json'}\n")
    args = ("--kv-policy", "snapkv()", "--kv-format", "calibrated", "--kv-budget-bytes")
    assert "budget" in taut("info", *args, "20000", model=model).out
    done = taut("info", *args, "30000", model=model)
    assert done.code == 2
    assert "taut calibrate kv-bits" in done.err
