"""Taut's server beside its peers': the same model, prompts and clients, in turns on one machine.

`python -m bench.race_serve --peers llamacpp,vllm --model smollm2-135m --clients 1,8,32 --json FILE`

Each client asks again as soon as it was answered. `make peers` brings the peers; what is fair about
it is in docs/racing.md.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench import race
from bench.common import environment, spread, write_json
from bench.peers import registry, taut
from bench.peers.match import Entry
from bench.peers.models import Files
from bench.peers.peer import Configuration, Job, PeerError
from bench.peers.prompts import TEXT, Windows
from bench.peers.servers import SERVERS, ServerRunner
from bench.serve import figures

log = logging.getLogger(__name__)

FIGURES: Mapping[str, str] = {
    "output_throughput": "tokens/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
}
"""The first: higher is better; of the others, lower."""

Round = Mapping[str, Mapping[str, float]]
"""By label, then figure."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.race_serve", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--peers", default="llamacpp,vllm", help="as in bench.race; may be empty")
    parser.add_argument("--taut", default="bf16", metavar="NAMES", help="Taut's configurations")
    parser.add_argument("--model", default="smollm2-135m", help="a packaged one, or a .gguf file")
    parser.add_argument("--clients", default="1,8,32", metavar="COUNTS")
    parser.add_argument("--asks", type=int, default=4, help="of each client, a round")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--text", type=Path, default=TEXT, help="that prompts are windows of")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds, to load or to answer"
    )
    parser.add_argument("--allow-busy", action="store_true", help="for trials")
    parser.add_argument("--wait-quiet", type=float, default=120.0, help="seconds, before a round")
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("bench").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, race.ended)
    try:
        outcome = run(args)
    except (ValueError, PeerError, OSError) as error:
        sys.exit(f"race_serve: {error}")
    for clients, part in outcome["clients"].items():
        Console().print(table(clients, part["rounds"]))
        for label, why in part["failures"].items():
            print(f"{label} is out: {why}")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All client counts, written to --json as each is done."""
    counts = [int(each) for each in args.clients.split(",")]
    if min(counts, default=0) < 1 or min(args.asks, args.repeat, args.threads) < 1:
        raise ValueError("--clients, --asks, --repeat and --threads must be at least 1")
    racing = [*chosen(args.taut, only=taut.NAME), *chosen(args.peers)]
    models = race.prepare(args.model, racing)
    ids = race.text_ids(Files(args.model), args.text)
    outcome: dict[str, Any] = {
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "environment": environment(),
        "clients": {},
    }
    with tempfile.TemporaryDirectory(prefix="race-") as logs:
        for clients in counts:
            entries = [_entry(each, clients, models, args, Path(logs)) for each in racing]
            windows = Windows(ids, f"{args.seed}/{clients}", clients * args.asks, args.input_len)
            rounds = play(entries, clients, windows, args)
            outcome["clients"][clients] = {
                "rounds": rounds,
                "ratios": ratios(rounds),
                "about": {each.label: each.about for each in entries},
                "failures": {each.label: each.failure for each in entries if each.failure},
            }
            write_json(args.json, outcome)
    return outcome


def chosen(text: str, only: str | None = None) -> list[Configuration]:
    """As `registry.configurations`, of servers."""
    return registry.configurations(text, only=only, engines=SERVERS)


def _entry(
    each: Configuration,
    clients: int,
    models: Mapping[str, Path],
    args: argparse.Namespace,
    logs: Path,
) -> Entry:
    job = Job(
        model=models[each.files],
        streams=clients,
        prompt_tokens=args.input_len,
        output_tokens=args.output_len,
        threads=args.threads,
        timeout=args.timeout,
        log=logs / f"{each.label.replace(':', '-')}.log",
    )
    return Entry(each.label, partial(SERVERS[each.peer].runner, each, job), {"bits": each.bits})


def play(
    entries: Sequence[Entry], clients: int, windows: Windows, args: argparse.Namespace
) -> list[Round]:
    """Warmed up by a first round that nobody counts; one server awake at a time."""
    rounds: list[Round] = []
    try:
        for number in range(args.repeat + 1):
            race.be_quiet(args)
            made: dict[str, Mapping[str, float]] = {}
            for entry in entries:
                if entry.failure is None:
                    _lap(entry, windows.take(number), clients, args.output_len, made)
            if number:
                rounds.append(made)
    finally:
        for entry in entries:
            entry.close()
    return rounds


def _lap(
    entry: Entry,
    prompts: Sequence[Sequence[int]],
    clients: int,
    output_len: int,
    made: dict[str, Mapping[str, float]],
) -> None:
    try:
        with entry.running() as runner:
            assert isinstance(runner, ServerRunner)
            values = figures(runner.load(prompts, output_len, clients))
    except PeerError as error:
        entry.fail(str(error))
        return
    if missing := [name for name in FIGURES if not values[name]]:
        entry.fail(f"there is no {missing[0]}: it sent its answers whole")
        return
    made[entry.label] = {name: values[name] for name in FIGURES}
    log.info("%d clients, %s: %.4g tokens/s", clients, entry.label, values["output_throughput"])


def ratios(rounds: Sequence[Round]) -> dict[str, dict[str, dict[str, Any]]]:
    """Taut's figure by the peer's, round by round: of each pair, by figure."""
    labels = dict.fromkeys(label for made in rounds for label in made)
    ours = [label for label in labels if label.startswith(f"{taut.NAME}:")]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for our in ours:
        for their in (label for label in labels if label not in ours):
            both = [made for made in rounds if our in made and their in made]
            if both:
                found[f"{our} / {their}"] = {
                    name: spread([made[our][name] / made[their][name] for made in both])._asdict()
                    for name in FIGURES
                }
    return found


def table(clients: int, rounds: Sequence[Round]) -> Table:
    """Medians, then the ratios'."""
    made = Table(title=f"{clients} clients", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("server", *FIGURES.values()):
        made.add_column(name)
    for label in dict.fromkeys(label for each in rounds for label in each):
        having = [each[label] for each in rounds if label in each]
        cells = [f"{spread([lap[name] for lap in having]).median:.4g}" for name in FIGURES]
        made.add_row(label, *cells)
    for pair, values in ratios(rounds).items():
        made.add_row(pair, *(f"{values[name]['median']:.2f}x" for name in FIGURES))
    return made


if __name__ == "__main__":
    main()
