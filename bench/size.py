"""Lines of each source file, largest first; points at those whose seam has gone wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 400


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.cpp", "*.h"], capture_output=True, text=True, check=True
    )
    sizes = sorted(
        ((len(Path(name).read_text().splitlines()), name) for name in listed.stdout.split()),
        reverse=True,
    )
    for lines, name in sizes[:12]:
        print(f"{lines:5d} {name}{'   <- past ' + str(LIMIT) if lines > LIMIT else ''}")
    for part in ("engine", "tests", "bench"):
        print(f"{sum(n for n, name in sizes if name.startswith(part + '/')):5d} {part}/ in all")
    return int(any(n > LIMIT and name.startswith("engine/") for n, name in sizes))


if __name__ == "__main__":
    sys.exit(main())
