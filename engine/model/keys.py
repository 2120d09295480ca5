"""Named values out of a file, read with errors that name the file and the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Keys:
    """The values under `prefix`; null counts as absent."""

    file: Path
    values: Mapping[str, Any]
    prefix: str = ""

    def error(self, what: str) -> ValueError:
        """To be raised: `what` is wrong with the file."""
        return ValueError(f"{self.file}: {what}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; a list, as of every layer, must hold one value throughout."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{self.prefix}{key} must be a positive integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{self.prefix}{key} must be a number, not {value!r}")
        if not math.isfinite(value):
            raise self.error(f"{self.prefix}{key} must be a finite number, not {value!r}")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self.error(f"{self.prefix}{key} must be above 0, not {value!r}")
        return value

    def optional(self, key: str) -> float | None:
        """A number, or None where it is absent."""
        return None if self.get(key) is None else self.number(key)
