"""Whether the pair needs its chain: answers behind thinking that was cut or disordered.

    python -m bench.abacus.chain_needed --models abacus --limit 200

Each problem's own chain is put back behind its prompt, whole or changed, the thinking is closed,
and the model answers at once. By guessing, a loop program's single digit is right one time in ten.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from random import Random
from typing import Any

from bench.abacus.asking import (
    Answer,
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
from bench.abacus.problems import BLANK, KINDS
from bench.abacus.task import ABACUS, Abacus
from bench.evaluation.graders import exact
from engine import Engine, SamplingParams

TASK = Abacus()
ANSWER_TOKENS = 64

Chain = list[str]
"""The texts of its tokens."""

Change = Callable[[Chain, Random], Chain]


def _last_cut(chain: Chain, _: Random) -> Chain:
    """Without the last thought, which states the answer."""
    ends = [index for index, token in enumerate(chain) if token == BLANK]
    return chain[: ends[-1]] if ends else []


def _shuffled_thoughts(chain: Chain, rng: Random) -> Chain:
    thoughts = "".join(chain).split(BLANK)
    return [BLANK.join(rng.sample(thoughts, len(thoughts)))]


CHANGES: dict[str, Change] = {
    "whole": lambda chain, _: chain,
    "without its last thought": _last_cut,
    "first half": lambda chain, _: chain[: len(chain) // 2],
    "none": lambda chain, _: [],
    "thoughts shuffled": _shuffled_thoughts,
    "tokens shuffled": lambda chain, rng: rng.sample(chain, len(chain)),
}


def answers_behind(engine: Engine, answers: list[Answer], change: Change) -> list[bool]:
    """Whether each is right when its chain is changed."""
    tokenizer = engine.tokenizer
    asked: list[list[int]] = []
    for index, answer in enumerate(answers):
        ids = tokenizer.encode(answer.choice.thinking.strip("\n"), add_special=False)
        chain = change([tokenizer.decode([token]) for token in ids], Random(index))
        text = f"<think>\n{''.join(chain)}\n</think>\n\n"
        asked.append([*answer.prompt, *tokenizer.encode(text, add_special=False)])
    outputs = engine.generate(asked, SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0))
    return [
        exact(output.text, answer.problem).verdict == "right"
        for output, answer in zip(outputs, answers, strict=True)
    ]


def measure_model(model: str, args: argparse.Namespace) -> dict[str, dict[str, list[bool]]]:
    """Verdicts by change and kind."""
    problems = TASK.make(ABACUS, args.limit, args.seed)
    with engine_of(model, args.threads) as engine:
        answers = ask(engine, problems, max_tokens=limit_for(TASK.max_tokens))
        verdicts = {
            name: answers_behind(engine, answers, change) for name, change in CHANGES.items()
        }
    verdicts = {"its own, as written": [answer.right for answer in answers], **verdicts}
    kinds = [problem.id.split("-")[0] for problem in problems]
    return {
        name: {
            kind: [right for right, of in zip(rights, kinds, strict=True) if of == kind]
            for kind in KINDS
        }
        for name, rights in verdicts.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for model in args.models:
        verdicts = measure_model(model, args)
        rows = [[name, *map(_rate, _with_all(by_kind))] for name, by_kind in verdicts.items()]
        print(f"\n{model}\n\n{markdown(['chain', 'all', *KINDS], rows)}", flush=True)
        found[model] = verdicts
    return found


def _with_all(by_kind: dict[str, list[bool]]) -> list[list[bool]]:
    return [[right for rights in by_kind.values() for right in rights], *by_kind.values()]


def _rate(rights: list[bool]) -> str:
    return percent(*accuracy(rights)) if rights else "none"


def main() -> None:
    parser = parser_of(__doc__, 200)
    models_option(parser)
    run(parser, measure)


if __name__ == "__main__":
    main()
