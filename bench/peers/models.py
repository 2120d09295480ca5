"""The files that peers read, all made from the one file that Taut reads.

`python -m bench.peers.models --model smollm2-135m` makes them beforehand; the race makes what is
missing. What is there stays; each is made beside its place and moved there whole.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.peers import hf_folder
from bench.peers.install import check_installed
from bench.peers.peer import PEERS_FOLDER, PeerError
from engine.model import packaged
from engine.model.checkpoint import open_checkpoint

FOLDER = PEERS_FOLDER / "models"
_ALIASES = {"smollm2-135m": "smollm2"}

# kind -> what it is made from, and llama-quantize's words for it
_QUANTISED: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "gguf-bf16": ("file", ("--allow-requantize",), "BF16"),
    "gguf-q8_0": ("gguf-bf16", (), "Q8_0"),
    "gguf-q4_0": ("gguf-bf16", (), "Q4_0"),
    "gguf-q4_0-pure": ("gguf-bf16", ("--pure",), "Q4_0"),
}
_EXPORTED: Mapping[str, tuple[str, ...]] = {
    "openvino-int4": ("--weight-format", "int4", "--sym", "--ratio", "1.0"),
    "openvino-int4-all": ("--weight-format", "int4", "--sym", "--ratio", "1.0", "--all-layers"),
    "openvino-int8": ("--weight-format", "int8"),
    "openvino-fp16": ("--weight-format", "fp16"),
}
KINDS = ("file", "hf", *_QUANTISED, *_EXPORTED)


class Files:
    """Of one model: a packaged name (or "smollm2-135m"), or a GGUF file."""

    def __init__(self, model: str, folder: Path = FOLDER) -> None:
        self.name = _ALIASES.get(model, model)
        if self.name not in packaged.MODELS and not self.name.endswith(".gguf"):
            names = ", ".join([*_ALIASES, *packaged.MODELS])
            raise ValueError(f"--model {model}: the race runs {names}, or a .gguf file")
        self._folder = folder / Path(self.name).name.removesuffix(".gguf")

    def path(self, kind: str) -> Path:
        """Where it lies; made if need be. PeerError says what is missing for that."""
        if kind == "file":
            return self._file()
        path = self._folder / (f"{kind}.gguf" if kind in _QUANTISED else kind)
        if not path.exists():
            print(f"making {kind} of {self.name}", file=sys.stderr, flush=True)
            self._make(kind, path)
        return path

    def _file(self) -> Path:
        if self.name in packaged.MODELS:
            return packaged.fetch(self.name)
        path = Path(self.name).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"--model {self.name}: there is no such file")
        return path

    def _make(self, kind: str, path: Path) -> None:
        half = path.with_name(f".making-{path.name}")
        if half.is_dir():
            shutil.rmtree(half)
        half.parent.mkdir(parents=True, exist_ok=True)
        if kind == "hf":
            hf_folder.write(open_checkpoint(self._file()), half)
        elif kind in _QUANTISED:
            self._quantise(kind, half)
        else:
            self._export(kind, half)
        os.replace(half, path)

    def _quantise(self, kind: str, half: Path) -> None:
        check_installed("llamacpp")
        source, switches, words = _QUANTISED[kind]
        tool = PEERS_FOLDER / "llamacpp" / "build" / "bin" / "llama-quantize"
        _run([str(tool), *switches, str(self.path(source)), str(half), words])

    def _export(self, kind: str, half: Path) -> None:
        check_installed("openvino")
        tool = PEERS_FOLDER / "openvino" / "bin" / "optimum-cli"
        task = ["--task", "text-generation-with-past"]
        command = [str(tool), "export", "openvino", "--model", str(self.path("hf")), *task]
        switches = list(_EXPORTED[kind])
        if "int4" in switches:
            switches += ["--group-size", str(self._group_size())]
        _run([*command, *switches, str(half)])

    def _group_size(self) -> int:
        """128, the exporter's usual one, where it divides every matrix's columns, else 64."""
        config = open_checkpoint(self._file()).config
        widths = (config.hidden_size, config.intermediate_size, config.q_heads * config.head_dim)
        return 128 if all(width % 128 == 0 for width in widths) else 64


def _run(command: Sequence[str]) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise PeerError(
            f"{Path(command[0]).name} ended with status {done.returncode}: "
            f"{' | '.join(lines[-4:])[-1000:]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.models", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(KINDS)}; without: all")
    args = parser.parse_args()
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    try:
        files = Files(args.model)
        for kind in args.kinds or KINDS:
            print(f"{kind}: {files.path(kind)}", flush=True)
    except (ValueError, PeerError, OSError) as error:
        sys.exit(f"models: {error}")


if __name__ == "__main__":
    main()
