"""How the native library is found and opened."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.kernels.attention import ATTENTION, AttentionSpec
from engine.kernels.cpp import attention, library
from engine.kernels.cpp.library import SETS, Context
from engine.kernels.dispatch import select

SPEC = AttentionSpec(64, 3, "cpu", torch.float32, torch.float32)


@pytest.fixture
def unfound(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if it hadn't been looked for yet; afterwards it is found again."""
    library.library.cache_clear()
    yield
    library.library.cache_clear()


def test_without_the_library_torch_serves(
    unfound: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_FILE", "libnowhere.so")
    with caplog.at_level(logging.WARNING):
        assert "libnowhere.so isn't built" in str(library.missing())
        assert library.available() == ()
        assert attention.refuses(SPEC) == library.missing()
    assert select(ATTENTION, SPEC).backend == "reference"
    assert len(caplog.records) == 1


def test_a_file_that_is_no_library_is_a_reason(
    unfound: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setattr(library, "_FILE", str(tmp_path / "broken.so"))
    assert "broken.so" in str(library.missing())


def test_another_interface_is_refused(
    unfound: None, monkeypatch: pytest.MonkeyPatch, best: Context
) -> None:
    library.library.cache_clear()
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    assert "build it again" in str(library.missing())


def test_the_best_set_and_torch_s_threads_are_the_default(
    best: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.FORCED, raising=False)
    found = library.context()
    assert (found.set, found.threads) == (library.available()[-1], torch.get_num_threads())
    assert library.context() is found


def test_a_set_can_be_forced(best: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCED, "portable")
    assert library.context().set == "portable"


@pytest.mark.parametrize("name", ["avx3", *SETS[len(library.available()) :]])
def test_a_set_that_this_processor_lacks_is_named(
    name: str, best: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.FORCED, name)
    with pytest.raises(ValueError, match=f"TAUT_ISA must be one of portable.* not '{name}'"):
        library.context()
