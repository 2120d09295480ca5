"""How long one batch takes from its prompts to its last token, and to its first.

`python -m bench.latency --model smollm2 --input-len 32 --output-len 128 --batch-size 8`
Field names are those of `vllm bench latency`. Every iteration has prompts of its own.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

from bench.common import (
    environment,
    fixed_length,
    make_engine,
    peak_rss_bytes,
    percentiles,
    random_prompts,
    timed,
    write_json,
)
from bench.options import add_engine_options, add_output_option
from engine import Engine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_options(parser)
    add_output_option(parser)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-iters-warmup", type=int, default=2)
    parser.add_argument("--num-iters", type=int, default=5)
    return parser.parse_args()


def measure(engine: Engine, args: argparse.Namespace, output_len: int, seed: int) -> list[float]:
    """Seconds of each measured iteration."""
    params = fixed_length(output_len)
    vocab = engine.tokenizer.vocab_size
    seconds = []
    for i in range(args.num_iters_warmup + args.num_iters):
        prompts = random_prompts(args.batch_size, args.input_len, vocab, seed + i)
        seconds.append(timed(partial(engine.generate, prompts, params)))
    return seconds[args.num_iters_warmup :]


def main() -> None:
    args = arguments()
    engine = make_engine(args)
    latencies = measure(engine, args, args.output_len, args.seed)
    # one token each: until the last of the batch has its first
    first = measure(engine, args, 1, args.seed + 1_000_000)
    engine.close()
    values: dict[str, Any] = {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": percentiles(latencies),
        "avg_time_to_first_token": statistics.fmean(first),
        "times_to_first_token": first,
        "peak_rss_bytes": peak_rss_bytes(),
    }
    print(f"Avg latency: {values['avg_latency']:.4f} s")
    for percent, seconds in values["percentiles"].items():
        print(f"{percent}% percentile latency: {seconds:.4f} s")
    print(f"Avg time to first token: {values['avg_time_to_first_token']:.4f} s")
    write_json(args.output_json, {**values, "arguments": vars(args), "environment": environment()})


if __name__ == "__main__":
    main()
