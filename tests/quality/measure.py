"""What the table's bands should be: `python -m tests.quality.measure [NAMES] [--write]`.

A band is the 95 % interval of the measured figure, rounded outwards to whole points: on the same
problems other machines differ by a few near-ties at most, so what leaves it has changed.
"""

from __future__ import annotations

import argparse
import re
import time
from math import ceil, floor
from pathlib import Path

from bench.abacus.asking import accuracy, difference, percent, points
from bench.evaluation.records import Interval
from tests.quality.table import FULL, ROWS, verdicts

TABLE = Path(__file__).with_name("table.py")


def band(interval: Interval) -> tuple[float, float]:
    return floor(100 * interval[0]) / 100, ceil(100 * interval[1]) / 100


def rewritten(source: str, name: str, low: float, high: float) -> str:
    """The table with another band in the line of that name."""
    line = re.compile(rf'(row\("{re.escape(name)}", )[-.\d]+, [-.\d]+')
    if not line.search(source):
        raise ValueError(f"{TABLE.name} has no row {name!r}")
    return line.sub(rf"\g<1>{low}, {high}", source)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", help="rows to measure; all without it")
    parser.add_argument("--write", action="store_true", help="into the table")
    args = parser.parse_args()
    if unknown := set(args.names) - {each.name for each in (FULL, *ROWS)}:
        parser.error(f"the table has no row {', '.join(sorted(unknown))}")
    full = verdicts(FULL)
    for each in (FULL, *ROWS):
        if args.names and each.name not in args.names:
            continue
        begin = time.perf_counter()
        rights = full if each is FULL else verdicts(each)
        found = accuracy(rights) if each is FULL else difference(full, rights)
        low, high = band(found[1])
        words = percent(*found) if each is FULL else f"{points(*found)} points"
        inside = "inside" if each.low <= found[0] <= each.high else "OUTSIDE"
        print(
            f"{each.name}: {words}, {inside} {each.low} to {each.high}; should be {low}, {high}"
            f"  ({time.perf_counter() - begin:.0f} s)",
            flush=True,
        )
        if args.write:
            TABLE.write_text(rewritten(TABLE.read_text("utf-8"), each.name, low, high), "utf-8")


if __name__ == "__main__":
    main()
