"""Accuracy against KV memory: every policy, allocation and format at every budget, resumable.

    python -m bench.kv_grid --model abacus --out abacus-grid --threads 1
    python -m bench.kv_grid --out abacus-grid --table

Each run is one of `bench.quality`, with the options that its record tells, in a file of its own.
Killed and started again it goes on; started twice on one folder, both work on it.
"""

# Light imports only at the top: the grading worker imports this module again, and needs no torch.

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.grid.points import PARTS, POLICIES, Point, budget_of, points

SHARES = ("10%", "20%", "40%")
CELLS = ("64", "128", "256")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kv_grid",
        description=(__doc__ or "").split("\n\n")[0],
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder of the runs")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    which = parser.add_argument_group("which runs")
    which.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    which.add_argument(
        "--policies", nargs="+", metavar="NAME", help=f"of {', '.join(POLICIES)} (all)"
    )
    which.add_argument(
        "--budgets",
        nargs="+",
        metavar="B",
        help="cells a head, or shares of the length "
        f"({', '.join(SHARES)} for the abacus, else {', '.join(CELLS)})",
    )
    which.add_argument(
        "--length",
        type=int,
        metavar="TOKENS",
        help="of a typical prompt and chain; the abacus has the median of its own",
    )
    asked = parser.add_argument_group("what is asked, and of whom: as of bench.quality")
    asked.add_argument("--model", default="abacus")
    asked.add_argument("--task", default="abacus")
    asked.add_argument("--problems", metavar="FILE")
    asked.add_argument("--limit", type=int, default=500, help="problems of a run")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument(
        "--max-tokens", type=int, help="of an answer (864 for the abacus, else 1024)"
    )
    for name in ("--samples", "--threads", "--max-num-seqs", "--max-batched-tokens", "--kv-bytes"):
        asked.add_argument(name, type=int)
    for name in ("--temperature", "--top-p"):
        asked.add_argument(name, type=float)
    for name in ("--weights", "--activations", "--dtype"):
        asked.add_argument(name)
    return parser.parse_args(argv)


PASSED = (
    *("model", "task", "problems", "limit", "seed", "max_tokens", "samples", "threads"),
    *("max_num_seqs", "max_batched_tokens", "kv_bytes", "temperature", "top_p"),
    *("weights", "activations", "dtype"),
)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    try:
        if args.table:
            from bench.grid.folder import results
            from bench.grid.table import tables

            print(tables(results(args.out)))
        else:
            measure(args)
    except (ValueError, OSError) as error:
        sys.exit(f"kv_grid: {error}")
    except KeyboardInterrupt:
        sys.exit("kv_grid: interrupted; the same command goes on")


def measure(args: argparse.Namespace) -> None:
    """Make what isn't there, one line to stderr for each run."""
    from bench.evaluation.grading import Grading
    from bench.grid.folder import digest_of
    from bench.grid.make import Maker, told
    from engine.model.checkpoint import open_checkpoint

    args.out.mkdir(parents=True, exist_ok=True)
    if args.max_tokens is None:
        args.max_tokens = 864 if args.task.startswith("abacus") else 1024
    said = {name: getattr(args, name) for name in PASSED}
    base = [f"--{name.replace('_', '-')}={said[name]}" for name in PASSED if said[name] is not None]
    maker = Maker(args.out, base, digest_of(open_checkpoint(args.model).path))
    listed = list(points_of(args))
    waiting = maker.prepare(listed)
    print(f"{len(listed)} runs, {len(listed) - len(waiting)} of them done", file=sys.stderr)
    with Grading() as grading:
        for number, point in enumerate(waiting, len(listed) - len(waiting) + 1):
            run = maker.make(point, grading)
            line = f"{point.name}: another process has it" if run is None else told(run)
            print(f"[{number}/{len(listed)}] {line}", file=sys.stderr, flush=True)


def points_of(args: argparse.Namespace) -> list[Point]:
    """ValueError: a budget, policy or length that can't be."""
    from bench.grid.folder import PROFILE
    from bench.grid.make import cell_bytes, typical_length
    from engine.model.checkpoint import open_checkpoint

    length = args.length or typical_length(args.task)
    texts = args.budgets or (CELLS if length is None else SHARES)
    return list(
        points(
            [budget_of(text, length) for text in texts],
            parts=args.parts,
            policies=args.policies,
            cell_bytes=cell_bytes(open_checkpoint(args.model)),
            profile=str(args.out / PROFILE),
        )
    )


if __name__ == "__main__":
    main()
