"""Whether the two models err on the same problems, and what choosing between them could give back.

    python -m bench.abacus.overlap --limit 300 --budget 64

Three runs of the same problems, greedy: `abacus` with the full cache, `abacus` truncated, and
`abacus-small` with the full cache. An oracle that takes whichever of the last two is right recovers
some of what truncation lost: the most that a helper can do for an evicted model.
"""

from __future__ import annotations

import argparse
from math import sqrt
from typing import Any

from bench.abacus.asking import (
    accuracy,
    ask,
    engine_of,
    limit_for,
    markdown,
    parser_of,
    percent,
    run,
)
from bench.abacus.task import ABACUS, Abacus
from bench.abacus.truncation import bounded
from engine import KVSpec, abacus

TASK = Abacus()


def both_wrong(a: list[bool], b: list[bool]) -> dict[str, float]:
    """Shares of problems, and the correlation of the two's mistakes (phi)."""
    n = len(a)
    wrong_a, wrong_b = (1 - sum(each) / n for each in (a, b))
    both = sum(not x and not y for x, y in zip(a, b, strict=True)) / n
    spread = sqrt(wrong_a * (1 - wrong_a) * wrong_b * (1 - wrong_b))
    return {
        "wrong_first": wrong_a,
        "wrong_second": wrong_b,
        "both_wrong": both,
        "both_wrong_if_independent": wrong_a * wrong_b,
        "correlation": (both - wrong_a * wrong_b) / spread if spread else 0.0,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    big, small = abacus.NAMES
    cut = f"{big}, {args.policy} {args.budget} + {args.budget // 2}"
    setups = {
        big: (big, KVSpec()),
        cut: (big, bounded(args.policy, args.budget)),
        small: (small, KVSpec()),
    }
    problems = TASK.make(ABACUS, args.limit, args.seed)
    rights: dict[str, list[bool]] = {}
    for name, (model, kv) in setups.items():
        with engine_of(model, args.threads, kv=kv) as engine:
            answers = ask(engine, problems, max_tokens=limit_for(TASK.max_tokens))
        rights[name] = [answer.right for answer in answers]
    oracle = f"the better of {cut} and {small}"
    rights[oracle] = [a or b for a, b in zip(rights[cut], rights[small], strict=True)]
    print(markdown(("run", "right"), [[n, percent(*accuracy(r))] for n, r in rights.items()]))
    lost = sum(rights[big]) - sum(rights[cut])
    recovered = (sum(rights[oracle]) - sum(rights[cut])) / lost if lost > 0 else None
    if recovered is not None:
        print(
            f"\nof the {lost} answers that truncation lost, the choice gives {recovered:.0%} back"
        )
    pairs = {
        f"{a} and {b}": both_wrong(rights[a], rights[b]) for a, b in ((big, small), (cut, small))
    }
    header = ["mistakes of", *(name.replace("_", " ") for name in next(iter(pairs.values())))]
    rows = [[name, *(f"{value:.3f}" for value in each.values())] for name, each in pairs.items()]
    print(f"\n{markdown(header, rows)}")
    return {"rights": rights, "recovered": recovered, "pairs": pairs}


def main() -> None:
    parser = parser_of(__doc__, 300)
    parser.add_argument("--policy", default="sinks_recent")
    parser.add_argument("--budget", type=int, default=64)
    run(parser, measure)


if __name__ == "__main__":
    main()
