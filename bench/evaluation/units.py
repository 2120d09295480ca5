"""Numbers as people read them: each with its unit, `NONE` where there is no number."""

from __future__ import annotations

import math
from datetime import timedelta

from bench.evaluation.records import Interval

NONE = "n/a"


def known(value: float | None) -> bool:
    """A number: neither None nor the mean of nothing."""
    return value is not None and not math.isnan(value)


def percent(share: float | None) -> str:
    return f"{100 * share:.1f} %" if share is not None and known(share) else NONE


def percent_range(share: float, interval: Interval) -> str:
    low, high = interval
    return f"{percent(share)} ({100 * low:.1f} to {percent(high)})"


def points_range(difference: float, interval: Interval) -> str:
    """Of two shares: percentage points."""
    low, high = (100 * end for end in interval)
    return f"{100 * difference:+.1f} points ({low:+.1f} to {high:+.1f})"


def times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio is not None and known(ratio) else NONE


def times_range(ratio: float | None, interval: Interval | None) -> str:
    if not known(ratio) or interval is None:
        return times(ratio)
    return f"{times(ratio)} ({interval[0]:.2f} to {times(interval[1])})"


def count(value: float | None, unit: str) -> str:
    """Rounded to whole ones."""
    return f"{value:,.0f} {unit}" if value is not None and known(value) else NONE


def counts(values: tuple[float, ...], unit: str) -> str:
    if not all(known(value) for value in values):
        return NONE
    return f"{' / '.join(f'{value:,.0f}' for value in values)} {unit}"


def amount(value: float | None, unit: str) -> str:
    """Three significant digits, never an exponent."""
    if value is None or not known(value):
        return NONE
    digits = 0 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f} {unit}"


def gigabytes(value: float | None, unit: str = "GB") -> str:
    """Of bytes, or with "GB·s" of byte-seconds; 10^9 to one."""
    return amount(None if value is None else value / 1e9, unit)


def clock(seconds: float) -> str:
    """Hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))
