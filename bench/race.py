"""Taut beside its peers: the same model, prompts and lengths, in turns on the same machine.

`python -m bench.race --peers llamacpp,openvino,vllm --model smollm2-135m --json FILE`

An interrupted race goes on from FILE when the same command is given again; a finished one is shown.
`make peers` brings the peers. docs/racing.md tells what is fair about it and what isn't.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from bench.common import environment
from bench.peers import busy, table, taut
from bench.peers.install import check_installed
from bench.peers.match import Entry, Match, Rules
from bench.peers.models import Files
from bench.peers.peer import Configuration, Job, PeerError, Runner
from bench.peers.prompts import TEXT, Windows, digest
from bench.peers.record import Record
from bench.peers.regimes import REGIMES, Regime
from bench.peers.registry import ENGINES, configurations
from engine.model.checkpoint import open_checkpoint
from engine.model.tokenizer import tokenizer_from_gguf

DEFAULT_REGIMES = [name for name in REGIMES if name != "batch16"]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.race", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--peers",
        default="llamacpp,openvino,vllm",
        help="such as 'llamacpp,openvino:int4': all usual configurations, or one by its name",
    )
    parser.add_argument("--taut", default="", metavar="NAMES", help="Taut's configurations")
    parser.add_argument("--model", default="smollm2-135m", help="a packaged one, or a .gguf file")
    parser.add_argument(
        "--regimes", default=",".join(DEFAULT_REGIMES), help=f"of {', '.join(REGIMES)}"
    )
    parser.add_argument("--repeat", type=int, default=5, help="rounds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--text", type=Path, default=TEXT, help="that prompts are windows of")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown too")
    parser.add_argument("--again", default="", metavar="REGIMES", help="that are raced anew")
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds to load, or for one call"
    )
    parser.add_argument(
        "--spare-gib", type=float, default=2.0, help="memory left before engines take turns in it"
    )
    parser.add_argument(
        "--allow-busy", action="store_true", help="race though other processes run: for trials"
    )
    parser.add_argument(
        "--wait-quiet", type=float, default=120.0, help="seconds to wait for others before a round"
    )
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("bench").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, ended)
    try:
        record = race(args)
    except (ValueError, PeerError, OSError) as error:
        sys.exit(f"race: {error}")
    except KeyboardInterrupt:
        kept = args.json and f"; the same command goes on from {args.json}"
        sys.exit(f"race: interrupted{kept or ''}")
    Console().print(table.outcome(record))
    if args.markdown:
        print(table.markdown(record))


def ended(number: int, _: Any) -> NoReturn:
    """Ended from outside: engines are closed on the way out."""
    sys.exit(128 + number)


def race(args: argparse.Namespace) -> Record:
    """All that isn't in the record yet. ValueError and PeerError come before the first lap."""
    regimes = _regimes(args.regimes)
    again = _regimes(args.again)
    _check(args)
    racing = [*configurations(args.taut or _usual_taut(), only=taut.NAME)]
    racing += configurations(args.peers)
    ids = text_ids(Files(args.model), args.text)
    record = Record(args.json, settings_of(args, racing, ids))
    for regime in again:
        record.forget(regime)
    left = [regime for regime in regimes if record.done(regime) < args.repeat]
    if left:
        models = prepare(args.model, racing)
        before = partial(be_quiet, args)
        before()
        rules = Rules(
            rounds=args.repeat, spare_bytes=int(args.spare_gib * 2**30), before_round=before
        )
        with tempfile.TemporaryDirectory(prefix="race-") as logs:
            for regime in left:
                entries = _entries(regime, racing, models, args, Path(logs), record)
                seed = f"{args.seed}/{regime.name}"
                windows = Windows(ids, seed, regime.streams, regime.prompt_tokens)
                play(Match(regime, entries, windows, rules), record)
    return record


def play(match: Match, record: Record) -> None:
    """The rounds that the record lacks, each written as it ends."""
    for laps in match.play(record.done(match.regime)):
        record.add(match.regime, laps, match.entries)
    record.note(match.regime, match.entries)


def prepare(model: str, racing: Sequence[Configuration]) -> dict[str, Path]:
    """By kind, the files of everyone, made where they aren't there."""
    for peer in sorted({each.peer for each in racing} - {taut.NAME}):
        check_installed(peer)
    files = Files(model)
    return {kind: files.path(kind) for kind in dict.fromkeys(each.files for each in racing)}


def takes_part(configuration: Configuration, regime: Regime) -> bool:
    if regime.bits is not None and configuration.bits != regime.bits:
        return False
    return configuration.starts_cold or regime.measure != "cold"


def settings_of(
    args: argparse.Namespace, racing: Sequence[Configuration], ids: Sequence[int]
) -> dict[str, Any]:
    """All that decides a lap; rounds and regimes may be added later."""
    return {
        "model": Path(Files(args.model).name).name,
        "configurations": [each.label for each in racing],
        "threads": args.threads,
        "seed": args.seed,
        "text": digest(ids),
        "commit": environment()["commit"],
    }


def _regimes(text: str) -> list[Regime]:
    names = [name for name in (part.strip() for part in text.split(",")) if name]
    if unknown := [name for name in names if name not in REGIMES]:
        raise ValueError(f"{unknown[0]!r} is no regime; they are {', '.join(REGIMES)}")
    return [REGIMES[name] for name in dict.fromkeys(names)]


def _check(args: argparse.Namespace) -> None:
    for name in ("repeat", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} must be at least 1, not {getattr(args, name)}")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ValueError(f"--json {args.json}: there is no folder {args.json.parent}")
    if not args.text.is_file():
        raise ValueError(f"--text {args.text}: there is no such file")


def _usual_taut() -> str:
    return ",".join(each.name for each in taut.PEER.chosen(None))


def text_ids(files: Files, text: Path) -> list[int]:
    metadata = open_checkpoint(files.path("file")).metadata
    if metadata is None:
        raise ValueError(f"{files.name} is no GGUF file, whose tokenizer the prompts need")
    tokenizer = tokenizer_from_gguf(metadata)
    return tokenizer.encode(text.read_text(encoding="utf-8"), add_special=False)


def _entries(
    regime: Regime,
    racing: Sequence[Configuration],
    models: dict[str, Path],
    args: argparse.Namespace,
    logs: Path,
    record: Record,
) -> list[Entry]:
    """Who failed in this regime before stays out."""
    out = record.failures.get(regime.name, {})
    return [
        Entry(
            each.label,
            partial(_open, each, regime, models[each.files], args, logs),
            {"bits": each.bits, "files": each.files},
        )
        for each in racing
        if takes_part(each, regime) and each.label not in out
    ]


def _open(
    configuration: Configuration, regime: Regime, model: Path, args: argparse.Namespace, logs: Path
) -> Runner:
    job = Job(
        model=model,
        streams=regime.streams,
        prompt_tokens=regime.prompt_tokens,
        output_tokens=regime.output_tokens,
        threads=args.threads,
        timeout=args.timeout,
        log=logs / f"{configuration.label.replace(':', '-')}.log",
    )
    return ENGINES[configuration.peer].runner(configuration, job)


def be_quiet(args: argparse.Namespace) -> None:
    if args.allow_busy:
        return
    used = busy.wait_until_quiet(args.wait_quiet)
    if used > busy.QUIET_CPUS:
        raise ValueError(
            f"other processes use {used:.2f} of {os.cpu_count()} CPUs (load "
            f"{os.getloadavg()[0]:.1f}), and {args.wait_quiet:g} s of waiting didn't help: end "
            "them, or give --allow-busy for a trial whose figures nobody quotes"
        )


if __name__ == "__main__":
    main()
