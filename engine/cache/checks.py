"""What policies and allocations refuse of their fields, in words that name the field."""

from __future__ import annotations

from collections.abc import Sequence


def at_least(least: float, **values: float | None) -> None:
    """None, which stands for a method's own size, is let through."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def share(**values: float) -> None:
    """A part of something: 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1, not {value}")


def kernel(value: int) -> None:
    """A pooling width that has a middle."""
    if value < 1 or value % 2 == 0:
        raise ValueError(f"kernel must be odd and at least 1 (no pooling), not {value}")


def one_of(known: Sequence[str], **values: str) -> None:
    for name, value in values.items():
        if value not in known:
            words = f"{', '.join(known[:-1])} or {known[-1]}"
            raise ValueError(f"{name} must be {words}, not {value!r}")
