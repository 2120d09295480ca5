"""What a KV policy does for long outputs: each policy and the full cache in turns, step by step.

`python -m bench.long --model smollm2 --kv-policies 'snapkv()' 'tam()' --output-lens 512`

For every length and policy two engines, one of them with the full cache, answer the same prompts
until a fixed number of tokens. They take turns of `--turn` seconds, so that whatever else the
machine does falls on both. Shown are tokens a second over the run's time, the peak of the KV cache,
how many requests ran at once, and of the policy's run which share of its time was compaction, the
longest that one step spent in it (in median steps), and the most steps that a stream had to wait.
`--kv-bytes` is what the streams have to share: with a bounded cache more of them run at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from bench.common import environment, fixed_length, make_engine, random_prompts, write_json
from bench.options import add_engine_options, add_output_option
from bench.steps import Clock, Step, steps_of, summary
from engine import Engine

CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}
WARMUP_TOKENS = 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_options(parser)
    add_output_option(parser)
    parser.add_argument(
        "--kv-policies", nargs="+", default=["snapkv()"], help="each against the full cache"
    )
    parser.add_argument("--output-lens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--input-len", type=int, default=64, help="of the shortest prompt")
    parser.add_argument(
        "--lockstep", action="store_true", help="prompts of one length: all are compacted at once"
    )
    parser.add_argument("--turn", type=float, default=2.0, help="seconds")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: the process's own time, for busy machines (with --threads 1)",
    )
    parser.set_defaults(kv_budget=128)
    return parser.parse_args()


def prompts_of(engine: Engine, args: argparse.Namespace) -> list[list[int]]:
    """Lengths are spread over a window, so that compactions are too, as they are in a server."""
    count, window = args.num_prompts, 0 if args.lockstep else args.kv_window
    lengths = [args.input_len + window * i // count for i in range(count)]
    longest = random_prompts(count, max(lengths), engine.tokenizer.vocab_size, args.seed)
    return [prompt[:length] for prompt, length in zip(longest, lengths, strict=True)]


def in_turns(runs: Mapping[str, Iterator[Step]], turn: float) -> dict[str, list[Step]]:
    """All of every run's steps, `turn` seconds of one and then of the next."""
    found: dict[str, list[Step]] = {name: [] for name in runs}
    left = dict(runs)
    while left:
        for name, run in list(left.items()):
            spent = 0.0
            while spent < turn:
                step = next(run, None)
                if step is None:
                    del left[name]
                    break
                found[name].append(step)
                spent += step.seconds
    return found


def compare(engines: Mapping[str, Engine], args: argparse.Namespace, length: int) -> dict[str, Any]:
    """Of each engine's run to this length: what its steps say, and its tokens a second."""
    clock = CLOCKS[args.clock]
    runs = {
        name: steps_of(engine, prompts_of(engine, args), fixed_length(length), clock)
        for name, engine in engines.items()
    }
    results = {}
    for name, steps in in_turns(runs, args.turn).items():
        seconds, tokens = sum(s.seconds for s in steps), sum(s.tokens for s in steps)
        rate = {"output_tokens_per_second": tokens / seconds, "seconds": seconds}
        results[name] = {**rate, "output_tokens": tokens, **summary(steps)}
    return results


def shown(name: str, length: int, found: Mapping[str, Any]) -> str:
    over_time = " ".join(f"{rate:.1f}" for rate in found["output_tokens_per_second_over_time"])
    lines = [
        f"{length} tokens, {name}: {found['output_tokens_per_second']:.1f} tokens/s"
        f" ({over_time} over time)",
        f"  KV {found['kv_bytes_peak'] / 1e6:.1f} MB at the peak and"
        f" {found['kv_side_bytes_peak'] / 1e6:.1f} MB beside it,"
        f" {found['streams_peak']} streams at once,"
        f" median step {1e3 * found['step_seconds_median']:.1f} ms",
    ]
    if found["compaction_seconds_longest"]:
        lines.append(
            f"  compaction {found['compaction_share']:.2%} of the time, at most"
            f" {found['compaction_longest_in_steps']:.2f} median steps in one;"
            f" a stream waits {found['wait_longest_steps']} steps at most"
        )
    return "\n".join(lines)


def bounded(args: argparse.Namespace, policy: str | None) -> Engine:
    own = argparse.Namespace(**vars(args))
    own.kv_policy = policy
    if policy is None:
        own.kv_budget = own.kv_budget_bytes = own.kv_allocation = None
    elif own.kv_budget_bytes is not None:
        own.kv_budget = None
    engine = make_engine(own)
    for _ in steps_of(engine, prompts_of(engine, args)[:1], fixed_length(WARMUP_TOKENS)):
        pass
    return engine


def main() -> None:
    args = arguments()
    results: list[dict[str, Any]] = []
    full = bounded(args, None)
    for policy in args.kv_policies:
        engine = bounded(args, policy)
        for length in args.output_lens:
            found = compare({"full cache": full, policy: engine}, args, length)
            for name, values in found.items():
                print(shown(name, length, values), flush=True)
            both = [values["output_tokens_per_second"] for values in found.values()]
            print(f"  {policy} / full cache: {both[1] / both[0]:.2f}", flush=True)
            results.append({"policy": policy, "output_len": length, "runs": found})
        engine.close()
    full.close()
    write_json(
        args.output_json,
        {"results": results, "arguments": vars(args), "environment": environment()},
    )


if __name__ == "__main__":
    main()
