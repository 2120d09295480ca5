"""Compare finished runs of `bench.quality`: `python -m bench.compare RUN.json --vs BASE.json`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.evaluation.show import read_run, show


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN.json")
    parser.add_argument("--vs", action="append", default=[], type=Path, metavar="BASE.json")
    parser.add_argument("--report", type=Path, metavar="FILE.html")
    args = parser.parse_args()
    try:
        show(read_run(args.run), [read_run(path) for path in args.vs], args.report)
    except (ValueError, OSError) as error:
        sys.exit(f"compare: {error}")


if __name__ == "__main__":
    main()
