"""How good, how long, how dear: accuracy, chain tokens and cost of one configuration, measured
on problems with known answers, and compared with other runs problem by problem.

`python -m bench.quality --model smollm2 --task gsm8k --problems FILE --limit 8 --max-tokens 256
--seed 0 --json FILE [--report FILE.html] [--vs RUN.json]`

An interrupted run goes on from `FILE.partial` when the same command is given again.
"""

# Light imports only at the top: the grading worker imports this module again, and needs no torch.

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from bench.evaluation import problems
from bench.evaluation.backend import Backend, Sampling
from bench.evaluation.grading import Grading
from bench.evaluation.live import Live
from bench.evaluation.records import Problem, Run
from bench.evaluation.records_json import to_json
from bench.evaluation.runner import Grades, Plan, View, digest_of, measure
from bench.evaluation.show import read_run, show
from bench.evaluation.store import Store
from bench.evaluation.summary import summarise
from bench.options import add_engine_options
from engine.request import SamplingParams

ENGINE_OPTIONS = ["dtype", "weights", "activations", "threads", "max_num_seqs"]
ENGINE_OPTIONS += ["max_batched_tokens", "kv_policy", "kv_allocation", "kv_budget", "kv_window"]
ENGINE_OPTIONS += ["kv_budget_bytes", "kv_format", "kv_tail", "kv_tail_format", "kv_bytes"]
SERVER_OPTIONS = ["concurrency", "timeout", "tokenizer", "api_key_env"]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.quality", description=(__doc__ or "").split("\n\n")[0]
    )
    add_engine_options(parser)
    parser.add_argument("--name", help="what the run is called; without it the name of its --json")
    asked = parser.add_argument_group("what is asked")
    asked.add_argument(
        "--task",
        action="append",
        required=True,
        help="gsm8k, math, abacus or reasoning-gym:NAME; several, each with its --problems",
    )
    asked.add_argument(
        "--problems",
        action="append",
        default=[],
        metavar="FILE",
        help="JSONL or data set of each gsm8k or math, in their order",
    )
    asked.add_argument(
        "--limit",
        action="append",
        type=int,
        help="problems from the beginning of each task; once for all tasks, or once a task",
    )
    asked.add_argument(
        "--instruction",
        help="instead of the task's own, mostly: reason step by step, answer in \\boxed{}",
    )
    asked.add_argument("--system", help="a system message")
    drawn = parser.add_argument_group("how it is sampled")
    drawn.add_argument("--max-tokens", type=int, default=1024)
    drawn.add_argument("--samples", type=int, default=1, help="of each problem")
    drawn.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    drawn.add_argument("--top-p", type=float)
    drawn.add_argument("--top-k", type=int)
    drawn.add_argument("--repetition-penalty", type=float)
    server = parser.add_argument_group("a server instead of the engine")
    server.add_argument("--base-url", help="OpenAI-compatible, such as http://127.0.0.1:8000/v1")
    server.add_argument("--api-key-env", default="OPENAI_API_KEY", help="variable with the key")
    server.add_argument("--concurrency", type=int, default=16)
    server.add_argument("--timeout", type=float, default=600.0, help="seconds of one answer")
    server.add_argument("--tokenizer", help="model whose vocabulary counts tokens and finds loops")
    out = parser.add_argument_group("what comes out")
    out.add_argument("--json", type=Path, metavar="FILE", help="the run as one JSON line")
    out.add_argument("--vs", action="append", default=[], type=Path, metavar="RUN.json")
    out.add_argument("--report", type=Path, metavar="FILE.html")
    args = parser.parse_args(argv)
    for name in ENGINE_OPTIONS if args.base_url else SERVER_OPTIONS:
        if getattr(args, name) != parser.get_default(name):
            which = (
                "the engine's, not a server's" if args.base_url else "a server's: give --base-url"
            )
            parser.error(f"--{name.replace('_', '-')} is {which}")
    return args


def main() -> None:
    args = arguments()
    try:
        check(args)
        bases = [read_run(path) for path in args.vs]
        tasks = load_tasks(args)
        for base in bases:
            if tasks.keys().isdisjoint(base.tasks):
                raise ValueError(f"--vs {base.name} has other tasks: {', '.join(base.tasks)}")
        run = execute(args, tasks)
        show(run, bases, args.report)
    except (ValueError, OSError) as error:
        sys.exit(f"quality: {error}")
    except KeyboardInterrupt:
        kept = args.json and f"; the same command goes on from {args.json}.partial"
        sys.exit(f"quality: interrupted{kept or ''}")


def check(args: argparse.Namespace) -> None:
    """What can be refused before anything is loaded."""
    SamplingParams(**asdict(sampling_of(args)))
    for name in ("samples", "concurrency"):
        value = getattr(args, name)
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    if args.samples > 1 and args.temperature == 0:
        raise ValueError(
            f"--samples {args.samples} at --temperature 0 are all the same: give a temperature"
        )
    given = [("json", args.json), ("report", args.report)]
    taken = {path.resolve(): "vs" for path in args.vs}
    for name, path in ((name, path) for name, path in given if path is not None):
        if path.is_dir():
            raise ValueError(f"--{name} {path} is a folder: name a file")
        if not os.access(path.resolve().parent, os.W_OK):
            raise ValueError(f"--{name} {path}: there is no folder {path.parent} to write to")
        if path.resolve() in taken:
            raise ValueError(f"--{name} and --{taken[path.resolve()]} are one file, {path}")
        taken[path.resolve()] = name


def sampling_of(args: argparse.Namespace) -> Sampling:
    return Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})


def load_tasks(args: argparse.Namespace) -> dict[str, list[Problem]]:
    """Problems by task; sources go to the tasks that read one, in order."""
    sources, tasks = list(args.problems), {}
    limits = args.limit or [None]
    if len(limits) not in (1, len(args.task)):
        raise ValueError(
            f"{len(limits)} --limit for {len(args.task)} --task: give one, or one each"
        )
    limits = limits * len(args.task) if len(limits) == 1 else limits
    for task, limit in zip(args.task, limits, strict=True):
        if task in tasks:
            raise ValueError(f"--task {task} is given twice")
        reads = problems.parse_task(task).generator is None
        source = sources.pop(0) if sources and reads else None
        tasks[task] = problems.load(task, source, limit, args.seed)
    if sources:
        raise ValueError(f"--problems {sources[0]}: no --task reads it")
    return tasks


def execute(args: argparse.Namespace, tasks: Mapping[str, Sequence[Problem]]) -> Run:
    """Measure, from where the record stands; write the run where `--json` says."""
    with ExitStack() as stack:
        target = args.json or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        store = stack.enter_context(Store(target, settings_of(args, tasks)))
        backend = backend_of(args)
        stack.callback(backend.close)
        grading = stack.enter_context(Grading())
        with Live() as live:
            return finish(args, tasks, store, backend, grading, live)


def finish(
    args: argparse.Namespace,
    tasks: Mapping[str, Sequence[Problem]],
    store: Store,
    backend: Backend,
    grading: Grades,
    view: View,
) -> Run:
    """Make what the store doesn't have yet, and write the run. ValueError: all of it failed."""
    plan = Plan(
        tasks=tasks,
        samples=args.samples,
        sampling=sampling_of(args),
        instruction=args.instruction,
        system=args.system,
    )
    measure(plan, backend, grading, store, view)
    failures = [sample.error for sample in store.samples if sample.verdict == "error"]
    if len(failures) == len(store.samples):
        raise ValueError(f"every sample failed, the first with: {failures[0]}")
    run = run_of(args, store, backend)
    store.finish(to_json(run))
    return run


def settings_of(args: argparse.Namespace, tasks: Mapping[str, Sequence[Problem]]) -> dict[str, Any]:
    """All that decides a run's samples or their cost."""
    names = ["model", "seed", "max_tokens", "samples", "temperature", "top_p", "top_k"]
    names += ["repetition_penalty", "instruction", "system"]
    names += ["base_url", "concurrency", "tokenizer"] if args.base_url else ENGINE_OPTIONS
    settings = {name: getattr(args, name) for name in names}
    settings["tasks"] = {name: [len(of), digest_of(of)] for name, of in tasks.items()}
    return settings


def backend_of(args: argparse.Namespace) -> Backend:
    if args.base_url is not None:
        from bench.evaluation.server_backend import ServerBackend

        return ServerBackend(
            args.base_url,
            args.model,
            api_key=os.environ.get(args.api_key_env),
            concurrency=args.concurrency,
            timeout=args.timeout,
            tokenizer=args.tokenizer,
        )
    from bench.common import make_engine
    from bench.evaluation.engine_backend import EngineBackend

    return EngineBackend(make_engine(args))


def run_of(args: argparse.Namespace, store: Store, backend: Backend) -> Run:
    from bench.common import environment

    def of(task: str) -> Any:
        samples = [sample for sample in store.samples if sample.task == task]
        return summarise(samples, [usage for name, usage in store.usages if name == task])

    where = {**environment(), **backend.environment(), "resumed_samples": store.resumed}
    return Run(
        name=args.name or (args.json.stem if args.json else args.model),
        chain_rule=backend.chain_rule,
        settings=store.settings,
        environment=where,
        summary=summarise(store.samples, [usage for _, usage in store.usages]),
        tasks={task: of(task) for task in args.task},
        samples=tuple(store.samples),
    )


if __name__ == "__main__":
    main()
