"""The model card of a packaged abacus: how it was made, and what it gets right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.abacus import train
from bench.abacus.export import Trained
from bench.abacus.problems import FAR, MIX
from engine import abacus

BEGIN, END = "<!-- accuracy -->", "<!-- /accuracy -->"
CURVE_ROWS = 10

_CARD = """---
license: apache-2.0
---
# {name}

One of two tiny reasoning models that come with Taut. It is an instrument, not a claim about big
models: it makes cuts of memory, weights and chain length show in answers within seconds. What holds
here has still to be shown on models that people use.

It simulates loop programs, works through ledgers of assignments and adds columns of digits, thought
by thought between `<think>` and `</think>`, and then answers. It knows nothing else, and no words.

- Architecture: Qwen3's, {layers} layers, width {width}, MLP {hidden}, {q_heads} query and
  {kv_heads} kv heads of {head_dim}, tied embeddings; {parameters:.2f} M parameters, bfloat16.
  Tokens are bytes, a blank line, and a name with its equals sign or colon. It takes 2048
  positions; how it does beyond its training is told below.
- Data: problems made by `bench/abacus/problems.py`, none twice: {mix}; chains of
  {least} to {most} tokens before re-checks. {habits}
  {far:.0%} of a ledger's references go to any entry, the others to one of the last three.
  Beside them drills (`bench/abacus/drill.py`): names given values over and over, of which only the
  recalled ones are learned; half of the sequences in the first {short:.0%} of the pools, a
  twentieth later.
- Training: `python -m bench.abacus.train {name}`, seed {seed}, {pools} of {planned} pools of
  {batches} batches of {batch_tokens} padded tokens; Muon for matrices, AdamW for the rest; chains
  grow from 100 tokens to their full length.
- Cost: {tokens:.0f} M learned tokens in {hours:.1f} hours on {machine}.{unfinished}
- Licence: Apache-2.0, as Taut's. The data are generated; nobody's text is in them.

## Curve

`exact` is the share of 200 held-out chains in which every token is the likeliest one.

| pool | longest chain | loss | exact | M tokens | hours |
|---|---|---|---|---|---|
{curve}

## Held-out accuracy

{begin}
Not measured yet: `python -m bench.abacus.accuracy --models {name} --card`.
{end}
"""


_HABITS = """Of the ledgers {checks:.0%} carry redundant
  re-checks, {slips:.0%}, where it can be, a slip that a re-check finds and corrects, with the loss
  masked on it, and {retold:.0%} many re-checks of which only what follows from the choice of a line
  is learned."""
_NO_HABITS = "There are no\n  re-checks and no slips."


def write(
    folder: Path, name: str, trained: Trained, log: Sequence[dict[str, Any]], machine: str
) -> None:
    recipe, shape = trained.recipe, trained.shape
    missing = round(recipe["stop"] * recipe["pools"]) - trained.pools
    (folder / "README.md").write_text(
        _CARD.format(
            name=name,
            layers=shape.layers,
            width=shape.width,
            hidden=shape.hidden,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            parameters=sum(weight.numel() for weight in trained.weights.values()) / 1e6,
            mix=", ".join(f"{share:.0%} {kind}" for kind, share in MIX.items()),
            least=train.LEAST,
            most=train.MOST,
            habits=_HABITS.format(**recipe["habits"])
            if any(recipe["habits"].values())
            else _NO_HABITS,
            far=FAR,
            seed=recipe["seed"],
            short=recipe["short"],
            pools=trained.pools,
            planned=recipe["pools"],
            batches=train.BATCHES,
            batch_tokens=train.BATCH_TOKENS,
            tokens=trained.tokens / 1e6,
            hours=trained.seconds / 3600,
            machine=machine,
            unfinished=f" {missing} pools of its recipe are missing." if missing else "",
            curve="\n".join(_row(row) for row in _spread(log)),
            begin=BEGIN,
            end=END,
        ),
        encoding="utf-8",
    )


def fill(name: str, table: str) -> Path:
    """Put a table between the card's marks. ValueError: no card, or one without them."""
    path = abacus.folder(name) / "README.md"
    if not path.is_file():
        raise ValueError(f"there is no {path}: python -m bench.abacus.package --models {name}")
    text = path.read_text(encoding="utf-8")
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"{path} has no {BEGIN} and {END} to write between")
    path.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")
    return path


def _spread(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """About `CURVE_ROWS` rows, evenly, the last one among them."""
    stride = max(1, -(-len(log) // CURVE_ROWS))
    return list(log[::-1][::stride])[::-1]


def _row(row: dict[str, Any]) -> str:
    cells = [row["pool"], row["longest"], f"{row['loss']:.4f}", f"{row['exact']:.1%}"]
    cells += [f"{row['tokens'] / 1e6:.1f}", f"{row['seconds'] / 3600:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"
