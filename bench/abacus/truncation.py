"""That memory matters: the same problems with ever less of the chain in view.

    python -m bench.abacus.truncation --limit 200 --budgets 256 128 96 64 48 32

StreamingLLM's truncation (first and last cells only) at several budgets, each with a window of half
of it, beside the full cache: the same problems, greedy, accuracy paired.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.abacus.asking import (
    Answer,
    accuracy,
    ask,
    difference,
    engine_of,
    limit_for,
    markdown,
    parser_of,
    percent,
    points,
    run,
)
from bench.abacus.task import ABACUS, Abacus
from engine import KVSpec
from engine.cache.registry import policy_from_text

TASK = Abacus()
BUDGETS = (256, 192, 128, 96, 64, 48, 32)


def bounded(policy: str, budget: int) -> KVSpec:
    """With a window of half the budget: at most one and a half times the budget is held."""
    return KVSpec(policy=policy_from_text(policy), budget_tokens=budget, window=budget // 2)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    problems = TASK.make(ABACUS, args.limit, args.seed)
    specs = {"full cache": KVSpec()}
    specs |= {
        f"{args.policy}, {budget} + {budget // 2}": bounded(args.policy, budget)
        for budget in args.budgets
    }
    base: list[bool] = []
    results = []
    for name, kv in specs.items():
        with engine_of(args.model, args.threads, kv=kv) as engine:
            answers = ask(engine, problems, max_tokens=limit_for(TASK.max_tokens))
        rights = [answer.right for answer in answers]
        base = base or rights
        results.append({"cache": name, **_figures(base, answers)})
        print(name, percent(*accuracy(rights)), sep="  ", flush=True)
    header = ("cache", "right", "less than full, points", "mean chain", "looped")
    print(f"\n{args.model}\n\n{markdown(header, [_row(each) for each in results])}")
    return results


def _figures(base: list[bool], answers: list[Answer]) -> dict[str, Any]:
    rights = [answer.right for answer in answers]
    return {
        "accuracy": accuracy(rights),
        "difference": difference(base, rights),
        "chain_tokens": sum(answer.choice.thinking_tokens for answer in answers) / len(answers),
        "looped": sum(answer.looped for answer in answers) / len(answers),
        "rights": rights,
    }


def _row(result: dict[str, Any]) -> list[str]:
    return [
        result["cache"],
        percent(*result["accuracy"]),
        points(*result["difference"]),
        f"{result['chain_tokens']:.0f}",
        f"{result['looped']:.0%}",
    ]


def main() -> None:
    parser = parser_of(__doc__, 200)
    parser.add_argument("--model", default=ABACUS)
    parser.add_argument("--policy", default="sinks_recent")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    run(parser, measure)


if __name__ == "__main__":
    main()
