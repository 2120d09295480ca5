"""Fresh problems as a file, for commands that read one: `taut calibrate kv-bits abacus --problems`.

python -m bench.abacus.write_problems problems.jsonl --limit 60 --seed 7
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.abacus.task import ABACUS
from bench.evaluation.problems import load


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--task", default=ABACUS, help="with parameters as of bench.quality")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        made = load(args.task, None, args.limit, args.seed)
        rows = [
            {"id": p.id, "question": p.question, "answer": p.answer, "instruction": p.instruction}
            for p in made
        ]
        args.file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"write_problems: {error}")


if __name__ == "__main__":
    main()
