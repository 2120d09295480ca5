"""Reading a request's JSON: what is wrong is named by its place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.server.errors import FieldError


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """A JSON object; null is an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FieldError(where, f"must be an object, not {value!r:.100}")
    return value


def string(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise FieldError(where, f"must be a non-empty string, not {value!r:.100}")
    return value


def boolean(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise FieldError(where, f"must be true or false, not {value!r:.100}")
    return value


def one_of(value: object, names: Collection[str], where: str) -> str:
    if not isinstance(value, str) or value not in names:
        raise FieldError(where, f"must be one of {', '.join(names)}, not {value!r:.100}")
    return value


def known_keys(given: Mapping[str, Any], names: Collection[str], where: str) -> None:
    """Refuse keys that mean nothing here; null asks for nothing."""
    unknown = [key for key, value in given.items() if key not in names and value is not None]
    if unknown:
        raise FieldError(
            f"{where}.{unknown[0]}", f"isn't understood; {where} has {', '.join(names)}"
        )
