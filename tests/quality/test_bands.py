"""Every configuration of the table stays in its band."""

from __future__ import annotations

import pytest

from bench.abacus.asking import accuracy, difference, percent, points
from tests.quality.table import FULL, ROWS, Row, verdicts

pytestmark = pytest.mark.abacus

ADVICE = "if that is meant, python -m tests.quality.measure --write"


@pytest.fixture(scope="module")
def full() -> list[bool]:
    return verdicts(FULL)


def test_the_full_engine(full: list[bool]) -> None:
    rate, interval = accuracy(full)
    assert FULL.low <= rate <= FULL.high, f"{percent(rate, interval)}; {ADVICE}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_configuration(row: Row, full: list[bool]) -> None:
    change, interval = difference(full, verdicts(row))
    assert row.low <= change <= row.high, f"{points(change, interval)} points; {ADVICE}"
