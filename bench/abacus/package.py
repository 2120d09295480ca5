"""Put trained models into the engine's package, each with its model card.

    python -m bench.abacus.package --models abacus abacus-small --folder build/abacus

The card's table of held-out accuracy is filled by `python -m bench.abacus.accuracy --card`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench.abacus import card
from bench.abacus.export import read_checkpoint, write_folder
from bench.abacus.network import Network
from bench.common import environment
from engine import abacus


def package(name: str, source: Path, machine: str) -> Path:
    """Write the model's folder; the folder. ValueError: no checkpoint, or one with no log."""
    trained = read_checkpoint(source / name / "checkpoint.pt")
    log = read_log(source / name / "log.jsonl")
    network = Network(trained.shape)
    network.load_state_dict(trained.weights)
    folder = abacus.folder(name)
    write_folder(folder, network)
    card.write(folder, name, trained, log, machine)
    return folder


def read_log(path: Path) -> list[dict[str, Any]]:
    """A row a pool."""
    if not path.is_file():
        raise ValueError(f"there is no {path}: it lies beside the checkpoint")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=abacus.NAMES, default=list(abacus.NAMES))
    parser.add_argument("--folder", type=Path, default=Path("build/abacus"))
    parser.add_argument("--machine", help="what it was trained on; this machine's CPU if left out")
    args = parser.parse_args()
    machine = args.machine or environment()["cpu"] or "an unnamed CPU"
    try:
        for name in args.models:
            folder = package(name, args.folder, machine)
            size = sum(file.stat().st_size for file in folder.iterdir())
            print(f"{folder}: {size / 1e6:.2f} MB")
    except (ValueError, OSError) as error:
        sys.exit(f"package: {error}")


if __name__ == "__main__":
    main()
