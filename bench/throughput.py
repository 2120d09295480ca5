"""How many tokens a second, many requests at once, nothing but the engine's own limits between.

`python -m bench.throughput --model smollm2 --num-prompts 32 --input-len 64 --output-len 256`
Field names are those of `vllm bench throughput`; of several runs the median one is reported, and
each has prompts of its own, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

from bench.common import (
    dataset_questions,
    environment,
    fixed_length,
    make_engine,
    peak_rss_bytes,
    random_prompts,
    spread,
    write_json,
)
from bench.native_time import Outside, outside_of
from bench.options import add_engine_options, add_output_option
from bench.steps import Step, steps_of, summary
from engine import Engine

Prompts = list[list[int]]
WARMUP_TOKENS = 8
PROFILED_STEPS = 16


class Run(NamedTuple):
    elapsed: float  # seconds
    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: list[Step]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_engine_options(parser)
    add_output_option(parser)
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--dataset-path", help='JSONL with "question"; instead of --input-len')
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="also time outside native code")
    return parser.parse_args()


def prompts_of(engine: Engine, args: argparse.Namespace, run: int) -> Prompts:
    """Those of the run-th run; a dataset is read on from where the run before stopped."""
    count = args.num_prompts
    if args.dataset_path is None:
        vocab = engine.tokenizer.vocab_size
        return random_prompts(count, args.input_len, vocab, args.seed + run)
    questions = dataset_questions(args.dataset_path)
    chosen = [questions[(run * count + i) % len(questions)] for i in range(count)]
    return [list(engine.tokenizer.encode(question)) for question in chosen]


def measure(engine: Engine, prompts: Prompts, output_len: int) -> Run:
    start = time.perf_counter()
    steps = list(steps_of(engine, prompts, fixed_length(output_len)))
    elapsed = time.perf_counter() - start
    made = sum(len(output.token_ids) for step in steps for output in step.outputs)
    return Run(elapsed, len(prompts), sum(map(len, prompts)), made, steps)


def outside_native(engine: Engine, prompts: Prompts) -> Outside:
    """What of decoding steps isn't native code, once as many were made to read the prompts."""
    params = fixed_length(4 * PROFILED_STEPS)
    ids = [engine.add(prompt, params) for prompt in prompts]
    for _ in range(PROFILED_STEPS):
        engine.step()
    found = outside_of(lambda: [engine.step() for _ in range(PROFILED_STEPS)])
    for id in ids:
        engine.abort(id)
    while engine.has_work():
        engine.step()
    return Outside(found.seconds / PROFILED_STEPS, found.share)


def result(runs: list[Run]) -> dict[str, Any]:
    run = sorted(runs)[len(runs) // 2]
    total = run.prompt_tokens + run.output_tokens
    return {
        "elapsed_time": run.elapsed,
        "num_requests": run.requests,
        "total_num_tokens": total,
        "requests_per_second": run.requests / run.elapsed,
        "tokens_per_second": total / run.elapsed,
        "num_output_tokens": run.output_tokens,
        "output_tokens_per_second": run.output_tokens / run.elapsed,
        "elapsed_times": [each.elapsed for each in runs],
        "elapsed_spread": spread([each.elapsed for each in runs])._asdict(),
        **summary(run.steps),
    }


def main() -> None:
    args = arguments()
    engine = make_engine(args)
    measure(engine, prompts_of(engine, args, args.runs), WARMUP_TOKENS)
    runs = [
        measure(engine, prompts_of(engine, args, run), args.output_len) for run in range(args.runs)
    ]
    values = result(runs)
    values["peak_rss_bytes"] = peak_rss_bytes()  # before the profiler takes its own
    if args.profile:
        outside = outside_native(engine, prompts_of(engine, args, args.runs + 1))
        values["outside_native"] = outside._asdict()
        print(f"Outside native code: {1e3 * outside.seconds:.2f} ms, {outside.share:.1%} of a step")
    engine.close()
    print(
        f"Throughput: {values['requests_per_second']:.2f} requests/s, "
        f"{values['tokens_per_second']:.2f} total tokens/s, "
        f"{values['output_tokens_per_second']:.2f} output tokens/s"
    )
    over_time = " ".join(f"{rate:.1f}" for rate in values["output_tokens_per_second_over_time"])
    print(f"Output tokens/s over time: {over_time}")
    print(
        f"KV: {values['kv_bytes_peak'] / 1e6:.2f} MB at the peak and "
        f"{values['kv_side_bytes_peak'] / 1e6:.2f} MB beside it, "
        f"{values['streams_peak']} streams at once"
    )
    print(
        f"Compaction: {values['compaction_share']:.1%} of the time, the longest in one step "
        f"{values['compaction_longest_in_steps']:.2f} median steps"
    )
    write_json(args.output_json, {**values, "arguments": vars(args), "environment": environment()})


if __name__ == "__main__":
    main()
