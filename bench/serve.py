"""Load on a running OpenAI-compatible server, with the figures of `vllm bench serve`.

`python -m bench.serve --base-url http://127.0.0.1:8000 --model smollm2 --num-prompts 64
--max-concurrency 8 --random-input-len 64 --random-output-len 128 --ignore-eos --save-result FILE`

TTFT is the time to the first text, thinking included; ITL lies between pieces of text, TPOT is the
time after the first one by the tokens after the first; E2EL ends with the last piece.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from bench.common import environment, percentiles, write_json
from bench.load import CHAT, COMPLETIONS, Answer, Ask, Load, Target, put
from bench.peers.prompts import TEXT

_METRICS = ("ttft", "tpot", "itl", "e2el")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--model", required=True, help="as the server calls it")
    parser.add_argument("--endpoint", choices=(COMPLETIONS, CHAT), default=COMPLETIONS)
    parser.add_argument("--api-key")
    parser.add_argument("--num-prompts", type=_positive, default=100)
    parser.add_argument(
        "--request-rate",
        type=_rate,
        default=math.inf,
        help="requests a second, or inf: all at once",
    )
    parser.add_argument("--max-concurrency", type=_positive, help="requests under way (any)")
    parser.add_argument(
        "--random-input-len",
        type=_positive,
        default=128,
        help="words of a prompt; the server counts tokens",
    )
    parser.add_argument("--random-output-len", type=_positive, default=128, help="tokens, at most")
    parser.add_argument(
        "--random-range-ratio",
        type=_share,
        default=0.0,
        help="lengths differ by up to so much: 0.2 is from 80 to 120 %%",
    )
    parser.add_argument("--temperature", type=float, help="what the server does (its default)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="every answer has its full length"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and the rate")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    parser.add_argument("--save-result", metavar="FILE")
    parser.add_argument(
        "--save-detailed", action="store_true", help="with the times of every request"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _rate(text: str) -> float:
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, or inf, not {text}")
    return value


def _share(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, 1 excluded, not {text}")
    return value


def random_asks(args: argparse.Namespace) -> list[Ask]:
    """Words of an English text at random: no two begin alike, so that no prefix cache helps."""
    generator = random.Random(args.seed)
    words = TEXT.read_text(encoding="utf-8").split()

    def length(about: int) -> int:
        spare = int(about * args.random_range_ratio)
        return generator.randint(about - spare, about + spare)

    return [
        Ask(
            " ".join(generator.choices(words, k=length(args.random_input_len))),
            length(args.random_output_len),
        )
        for _ in range(args.num_prompts)
    ]


def target_of(args: argparse.Namespace) -> Target:
    fields: dict[str, Any] = {}
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    if args.ignore_eos:
        fields["ignore_eos"] = True
    return Target(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        model=args.model,
        endpoint=args.endpoint,
        api_key=args.api_key,
        timeout=args.timeout,
        fields=fields,
    )


def figures(load: Load) -> dict[str, Any]:
    """Field names of `vllm bench serve`; None where nothing was there to measure."""
    done = [each for each in load.answers if each.error is None]
    read = sum(each.input_tokens for each in done)
    made = sum(each.output_tokens for each in done)
    values: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(done),
        "failed": len(load.answers) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": made,
        "request_throughput": len(done) / load.seconds,
        "output_throughput": made / load.seconds,
        "total_token_throughput": (read + made) / load.seconds,
    }
    for name, seconds in _times(done).items():
        values |= _spread(name, seconds)
    return values


def _times(done: Sequence[Answer]) -> dict[str, list[float]]:
    """Seconds, by metric."""
    paced = [each for each in done if each.output_tokens > 1]
    return {
        "ttft": [each.first for each in done],
        "tpot": [(each.last - each.first) / (each.output_tokens - 1) for each in paced],
        "itl": [gap for each in done for gap in each.gaps],
        "e2el": [each.last for each in done],
    }


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    keys = [f"{key}_{name}_ms" for key in ("mean", "median", "std", "p99")]
    if not seconds:
        return dict.fromkeys(keys)
    milliseconds = [1e3 * each for each in seconds]
    points = percentiles(milliseconds)
    values = (statistics.fmean(milliseconds), points["50"], statistics.pstdev(milliseconds))
    return dict(zip(keys, (*values, points["99"]), strict=True))


def detailed(load: Load) -> dict[str, Any]:
    answers = load.answers
    return {
        "input_lens": [each.input_tokens for each in answers],
        "output_lens": [each.output_tokens for each in answers],
        "ttfts": [None if each.error else each.first for each in answers],
        "itls": [each.gaps for each in answers],
        "errors": [each.error or "" for each in answers],
    }


def table(values: dict[str, Any]) -> str:
    lines = [
        f"{'Successful requests':<26}{values['completed']}",
        f"{'Failed requests':<26}{values['failed']}",
        f"{'Duration':<26}{values['duration']:.2f} s",
        f"{'Input / output tokens':<26}{values['total_input_tokens']}"
        f" / {values['total_output_tokens']}",
        f"{'Requests':<26}{values['request_throughput']:.2f} /s",
        f"{'Output tokens':<26}{values['output_throughput']:.2f} /s",
        f"{'All tokens':<26}{values['total_token_throughput']:.2f} /s",
        f"{'ms':<12}" + "".join(f"{key:>10}" for key in ("mean", "median", "p99")),
    ]
    for name in _METRICS:
        cells = (values[f"{key}_{name}_ms"] for key in ("mean", "median", "p99"))
        said = ("-" if value is None else f"{value:.2f}" for value in cells)
        lines.append(f"{name.upper():<12}" + "".join(f"{cell:>10}" for cell in said))
    return "\n".join(lines)


async def measure(target: Target, asks: Sequence[Ask], args: argparse.Namespace) -> Load:
    """After one request that must succeed, or nothing is measured."""
    (first,) = (await put(target, [Ask("Hello", 16)])).answers
    if first.error is not None:
        sys.exit(f"serve: {target.base_url}{target.endpoint}: {first.error}")
    return await put(
        target,
        asks,
        request_rate=args.request_rate,
        max_concurrency=args.max_concurrency,
        seed=args.seed,
    )


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    load = asyncio.run(measure(target_of(args), random_asks(args), args))
    values = figures(load)
    print(table(values))
    if values["failed"]:
        print(f"first failure: {next(each.error for each in load.answers if each.error)}")
    result = {
        "date": environment()["date"],
        "endpoint": args.endpoint,
        "model_id": args.model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "max_concurrency": args.max_concurrency,
        **values,
        **(detailed(load) if args.save_detailed else {}),
        "environment": environment(),
    }
    write_json(args.save_result, result)
    if not values["completed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
