"""Held-out accuracy of the pair by kind and length of chain, greedy and sampled at 0.6.

    python -m bench.abacus.accuracy --limit 100 --json accuracy.json --card

Chains of up to 400 tokens are what training had. Longer ones are loop programs only: the other
kinds end with the alphabet's 26 names. `--card` puts the table into the packaged model's card.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.abacus import card
from bench.abacus.asking import (
    accuracy,
    ask,
    engine_of,
    limit_for,
    markdown,
    models_option,
    parser_of,
    percent,
    run,
)
from bench.abacus.problems import KINDS
from bench.abacus.task import ABACUS, Abacus
from engine import Engine

LENGTHS = ((50, 100), (100, 200), (200, 300), (300, 400))
BEYOND = ((400, 600), (600, 1000))
LONGEST_LEDGERS = 300
MIX_TIMES = 5
"""The default mix gets so many times the problems of a cell."""
TEMPERATURES = (0.0, 0.6)

CELLS = (
    Abacus(),
    *(
        Abacus(kind=kind, min_tokens=a, max_tokens=b)
        for kind in KINDS
        for a, b in LENGTHS
        if kind != "ledger" or b <= LONGEST_LEDGERS
    ),
    *(Abacus(kind="loop", min_tokens=a, max_tokens=b) for a, b in BEYOND),
)


def measure_cell(engine: Engine, cell: Abacus, limit: int, seed: int) -> dict[str, Any]:
    """Verdicts and chain lengths at each temperature."""
    problems = cell.make(ABACUS, limit * (MIX_TIMES if cell.kind is None else 1), seed)
    result: dict[str, Any] = {
        "kind": cell.kind or "default mix",
        "chain": [cell.min_tokens, cell.max_tokens],
        "problems": len(problems),
    }
    for temperature in TEMPERATURES:
        answers = ask(
            engine, problems, max_tokens=limit_for(cell.max_tokens), temperature=temperature
        )
        rate, interval = accuracy([answer.right for answer in answers])
        tokens = sum(answer.choice.thinking_tokens for answer in answers) / len(answers)
        result[f"at {temperature:g}"] = {
            "accuracy": rate,
            "interval": interval,
            "chain_tokens": tokens,
        }
    return result


def row(result: dict[str, Any]) -> list[object]:
    chain = "{} to {}".format(*result["chain"])
    shown = [result[f"at {temperature:g}"] for temperature in TEMPERATURES]
    rates = [percent(each["accuracy"], each["interval"]) for each in shown]
    return [result["kind"], chain, result["problems"], *rates, f"{shown[0]['chain_tokens']:.0f}"]


HEADER = ("kind", "chain tokens", "problems", "greedy", "at 0.6", "mean chain, greedy")


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for model in args.models:
        results = []
        with engine_of(model, args.threads) as engine:
            for cell in CELLS:
                results.append(measure_cell(engine, cell, args.limit, args.seed))
                print(model, *row(results[-1]), sep="  ", flush=True)
        table = markdown(HEADER, map(row, results))
        print(f"\n{model}\n\n{table}\n", flush=True)
        if args.card:
            command = f"python -m bench.abacus.accuracy --limit {args.limit} --seed {args.seed}"
            told = f"Right, with 95 % intervals; `{command}`.\n\n{table}"
            print(f"written into {card.fill(model, told)}")
        found[model] = results
    return found


def main() -> None:
    parser = parser_of(__doc__, 100, f"problems of a cell; of the mix {MIX_TIMES} times as many")
    models_option(parser)
    parser.add_argument("--card", action="store_true", help="fill the model's card too")
    run(parser, measure)


if __name__ == "__main__":
    main()
