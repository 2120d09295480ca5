"""Taut's server beside its peers': the same model, prompts and clients, in turns on one machine.

`python -m bench.race_serve --peers llamacpp,vllm --model smollm2-135m --clients 1,8,32 --json FILE`

Each client asks again as soon as it was answered. An interrupted race goes on from FILE when the
same command is given again; a finished one is shown. `make peers` brings the peers; what is fair
about it is in docs/racing.md.
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

from rich import box
from rich.console import Console
from rich.table import Table

from bench import race
from bench.common import spread
from bench.peers import registry, taut
from bench.peers.match import Entry
from bench.peers.models import Files
from bench.peers.peer import Configuration, Job, PeerError
from bench.peers.prompts import TEXT, Windows
from bench.peers.serve_record import FIGURES, Round, ServeRecord, ratios
from bench.peers.servers import SERVERS, ServerRunner
from bench.serve import figures

log = logging.getLogger(__name__)


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
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--again", default="", metavar="COUNTS", help="that are raced anew")
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
        record = run(args)
    except (ValueError, PeerError, OSError) as error:
        sys.exit(f"race_serve: {error}")
    except KeyboardInterrupt:
        kept = args.json and f"; the same command goes on from {args.json}"
        sys.exit(f"race_serve: interrupted{kept or ''}")
    for clients, rounds in record.rounds.items():
        Console().print(table(clients, rounds))
        for label, why in record.failures[clients].items():
            print(f"{label} is out: {why}")


def run(args: argparse.Namespace) -> ServeRecord:
    """All that isn't in the record yet. ValueError and PeerError come before the first lap."""
    counts, again = _counts(args.clients), _counts(args.again)
    if not counts or min(*counts, args.asks, args.repeat, args.threads) < 1:
        raise ValueError("--clients, --asks, --repeat and --threads must be at least 1")
    racing = [*chosen(args.taut, only=taut.NAME), *chosen(args.peers)]
    ids = race.text_ids(Files(args.model), args.text)
    sizes = {name: getattr(args, name) for name in ("asks", "input_len", "output_len")}
    record = ServeRecord(args.json, {**race.settings_of(args, racing, ids), **sizes})
    for clients in again:
        record.forget(clients)
    left = [clients for clients in counts if record.done(clients) < args.repeat]
    if left:
        models = race.prepare(args.model, racing)
        with tempfile.TemporaryDirectory(prefix="race-") as logs:
            for clients in left:
                out = record.failures.get(clients, {})
                entries = [
                    _entry(each, clients, models, args, Path(logs))
                    for each in racing
                    if each.label not in out
                ]
                seed = f"{args.seed}/{clients}"
                windows = Windows(ids, seed, clients * args.asks, args.input_len)
                play(entries, clients, windows, args, record)
    return record


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(int(each) for each in text.split(",") if each.strip()))


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
    entries: Sequence[Entry],
    clients: int,
    windows: Windows,
    args: argparse.Namespace,
    record: ServeRecord,
) -> None:
    """The rounds that the record lacks, each written as it ends, after one that warms up and that
    nobody counts; one server awake at a time."""

    def laps(number: int) -> dict[str, Mapping[str, float]]:
        race.be_quiet(args)
        made: dict[str, Mapping[str, float]] = {}
        for entry in entries:
            if entry.failure is None:
                _lap(entry, windows.take(number), clients, args.output_len, made)
        return made

    try:
        laps(0)
        for number in range(record.done(clients), args.repeat):
            if all(entry.failure is not None for entry in entries):
                break
            record.add(clients, laps(number + 1), entries)
        record.note(clients, entries)
    finally:
        for entry in entries:
            entry.close()


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
