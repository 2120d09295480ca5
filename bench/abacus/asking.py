"""What the pair's measurements share: an engine asked many problems, and tables of the verdicts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.evaluation.graders import exact
from bench.evaluation.intervals import mean_of_differences_interval, wilson
from bench.evaluation.records import Interval, Problem
from bench.evaluation.runner import seed_of
from engine import Choice, Engine, EngineConfig, ModelSpec, SamplingParams, abacus
from engine.scheduler.detect import find_loop


class Answer(NamedTuple):
    """What one problem got."""

    problem: Problem
    prompt: tuple[int, ...]
    choice: Choice

    @property
    def right(self) -> bool:
        return exact(self.choice.text, self.problem).verdict == "right"

    @property
    def looped(self) -> bool:
        return find_loop(self.choice.token_ids) is not None


def engine_of(model: str, threads: int | None = None, **spec: Any) -> Engine:
    """`spec` is ModelSpec's."""
    return Engine(EngineConfig(models={"main": ModelSpec(model, **spec)}, threads=threads))


def ask(
    engine: Engine,
    problems: Sequence[Problem],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    logprobs: int | None = None,
) -> list[Answer]:
    """All at once; a problem has the same noise in every configuration."""
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            logprobs=logprobs,
            seed=seed_of(0, problem.task, problem.id, 0),
        )
        for problem in problems
    ]
    asked = [[{"role": "user", "content": problem.question}] for problem in problems]
    outputs = engine.generate(asked, params)
    return [
        Answer(problem, output.prompt_token_ids, output.choices[0])
        for problem, output in zip(problems, outputs, strict=True)
    ]


def limit_for(chain_tokens: int) -> int:
    """Output tokens for problems of such chains: re-checks have room, endless loops haven't."""
    return 2 * chain_tokens + 64


# -- tables ----------------------------------------------------------------------------------------


def accuracy(rights: Sequence[bool]) -> tuple[float, Interval]:
    """With its 95 % interval."""
    rate = sum(rights) / len(rights)
    return rate, wilson(rate, len(rights))


def difference(base: Sequence[bool], run: Sequence[bool]) -> tuple[float, Interval]:
    """Accuracy of run less that of base on the same problems, with its 95 % interval."""
    each = [int(b) - int(a) for a, b in zip(base, run, strict=True)]
    return sum(each) / len(each), mean_of_differences_interval([each])


def percent(rate: float, interval: Interval) -> str:
    return f"{100 * rate:.1f} % ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def points(change: float, interval: Interval) -> str:
    return f"{100 * change:+.1f} ({100 * interval[0]:+.1f} to {100 * interval[1]:+.1f})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


# -- commands --------------------------------------------------------------------------------------


def parser_of(doc: str | None, limit: int, what: str = "problems") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--limit", type=int, default=limit, help=what)
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument("--threads", type=int, help="all CPUs of the process without it")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Any]) -> None:
    """Measure, and write what comes out as JSON too; bad input is one line."""
    args = parser.parse_args()
    try:
        if args.limit < 1:
            raise ValueError(f"--limit must be at least 1, not {args.limit}")
        result = measure(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{parser.prog}: {error}")
    if args.json is not None:
        from bench.common import environment

        settings = {name: value for name, value in vars(args).items() if name != "json"}
        record = {"settings": settings, "environment": environment(), "result": result}
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def models_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=list(abacus.NAMES))
