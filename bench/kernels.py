"""Native kernels against torch: whether they are right, and how fast.

`python -m bench.kernels --check` holds every case of bench/cases/ against its reference, on every
instruction set that the processor has, with 1 and 2 threads; any failure is the exit status.
`python -m bench.kernels` times those that are a real model's: native and reference in turns, the
median of several rounds and what they range over, operations and bytes a second, and the ratio. On
one thread the clock is the thread's processor time, which is fair on a busy machine too.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from bench.cases.case import Case, Trial
from bench.cases.check import all_cases, gap
from bench.common import Spread, environment, spread, write_json
from engine.kernels.cpp import library

ROUNDS = 7
LEAST_SECONDS = 0.01
"""Of one round: as many calls as take so long."""


class Timing(NamedTuple):
    """Seconds of a call; `ratio` is the reference's time over the native one, pair by pair."""

    native: Spread
    reference: Spread
    ratio: Spread


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="results, not speed")
    parser.add_argument("--op", help="only this op's cases")
    parser.add_argument("--case", metavar="TEXT", help="only cases whose names have it")
    parser.add_argument("--set", choices=library.SETS, help="only this instruction set")
    parser.add_argument("--threads", type=int, help="only with so many threads")
    parser.add_argument("--json", metavar="FILE", help="also write the results there")
    return parser.parse_args()


def check(
    cases: Sequence[Case], sets: Sequence[str], threads: Sequence[int]
) -> list[dict[str, Any]]:
    """Prints a line a case: its worst error beside the bound, and where it exceeds that."""
    results = []
    for case in cases:
        gaps, failed, parts = {}, [], []
        for s, t in itertools.product(sets, threads):
            where, found, bound = f"{s} x{t}", gap(case, library.opened(t, s)), case.bound_on(s)
            gaps[where] = found
            parts.append((found / bound, found, bound))
            if not found <= bound:
                failed.append(where)
        _, worst, bound = max(parts)
        verdict = f"FAILED on {', '.join(failed)}" if failed else "ok"
        print(f"{case.op:14} {case.name:44} {worst:8.1e} of {bound:8.1e}  {verdict}", flush=True)
        results.append({"op": case.op, "case": case.name, "failed": failed, "errors": gaps})
    return results


def calls_of(run: Callable[[], Any], clock: Callable[[], float]) -> int:
    """How many make a round; runs it for the first time too."""
    run()
    start = clock()
    run()
    return 1 + int(LEAST_SECONDS / max(clock() - start, 1e-7))


def seconds(run: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(calls):
        run()
    return (clock() - start) / calls


def timing(trial: Trial, clock: Callable[[], float]) -> Timing:
    sides = trial.run, trial.expected
    calls = [calls_of(side, clock) for side in sides]
    rounds = [
        [seconds(side, count, clock) for side, count in zip(sides, calls, strict=True)]
        for _ in range(ROUNDS)
    ]
    native, reference = zip(*rounds, strict=True)
    ratios = [theirs / ours for ours, theirs in rounds]
    return Timing(spread(native), spread(reference), spread(ratios))


def measure(cases: Sequence[Case], set: str, threads: int) -> list[dict[str, Any]]:
    """Prints a line a case."""
    torch.set_num_threads(threads)
    context = library.opened(threads, set)
    clock = time.thread_time if threads == 1 else time.perf_counter
    print(f"{set}, {threads} threads, {clock.__name__}; microseconds: median (least to most)")
    results = []
    for case in cases:
        trial = case.make(context)
        result = timing(trial, clock)
        ours, ratio = result.native, result.ratio
        print(
            f"{case.op:14} {case.name:32} {1e6 * ours.median:9.1f} "
            f"({1e6 * ours.min:.1f} to {1e6 * ours.max:.1f}) "
            f"{trial.flops / ours.median / 1e9:7.1f} GFLOP/s "
            f"{trial.nbytes / ours.median / 1e9:6.1f} GB/s "
            f"{ratio.median:6.2f}x torch ({ratio.min:.2f} to {ratio.max:.2f})",
            flush=True,
        )
        times = {name: value._asdict() for name, value in result._asdict().items()}
        work = {"flops": trial.flops, "bytes": trial.nbytes}
        results.append({"op": case.op, "case": case.name, **times, **work})
    return results


def main() -> None:
    args = arguments()
    if (reason := library.missing()) is not None:
        raise SystemExit(f"no native kernels: {reason}")
    cases = [case for case in all_cases() if args.op in (None, case.op)]
    cases = [case for case in cases if args.case is None or args.case in case.name]
    sets = [args.set] if args.set else list(library.available())
    if args.check:
        results = check(cases, sets, [args.threads] if args.threads else [1, 2])
    else:
        timed = [case for case in cases if case.timed]
        results = measure(timed, sets[-1], args.threads or torch.get_num_threads())
    write_json(args.json, {"results": results, "environment": environment()})
    if any(result.get("failed") for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
