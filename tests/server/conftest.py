"""One tiny model, and servers over it."""

from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from tests.scripted import tiny_folder, tiny_spec
from tests.server.live import Live, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def config(folder: str) -> EngineConfig:
    return tiny_spec(folder)


@pytest.fixture
def live(config: EngineConfig) -> Iterator[Live]:
    with serving(config) as live:
        yield live
