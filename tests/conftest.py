"""Tiny models on disk, made once, and engines over them that must end idle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine
from tests.engines import Model, assert_idle, open_engine, write_model

MakeEngine = Callable[..., Engine]

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """`make_model(family, **flags)`: the same arguments give the same folder."""
    made: dict[str, Model] = {}

    def make(family: str = "llama", **flags: Any) -> Model:
        key = repr((family, sorted(flags.items())))
        if key not in made:
            made[key] = write_model(tmp_path_factory.mktemp(family), family, **flags)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_model(make_model: Callable[..., Model]) -> Model:
    """A llama."""
    return make_model()


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Model) -> Path:
    """Its Hugging Face folder."""
    return tiny_model.folder


@pytest.fixture
def make_engine(tiny_model: Model) -> Iterator[MakeEngine]:
    """`open_engine`, over the llama model if none is given. All must be idle at the test's end."""
    opened: list[Engine] = []

    def make(model: Model | None = None, **config: Any) -> Engine:
        opened.append(open_engine(model or tiny_model, **config))
        return opened[-1]

    yield make
    for engine in opened:
        assert_idle(engine)
        engine.close()
