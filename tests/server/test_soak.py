"""The short form of the soak; `make soak` is the long one."""

import pytest

from tests.server import soak

REQUESTS = 60


@pytest.mark.parametrize("model", soak.MODELS)
def test_nothing_is_left_of_a_storm(folder: str, model: str) -> None:
    soak.check(soak.soak(folder, model, REQUESTS), REQUESTS)
