"""Train the abacus pair: `python -m bench.abacus.train abacus abacus-small` (or `make abacus`).

A pool of fresh problems at a time, never one twice. Chains grow from short to long, so that recall
is learned where it is near. Killed and started again, it goes on after the last whole pool; a
recipe that has changed since is refused.

    python -m bench.abacus.train abacus --folder build/abacus --threads 2 --minutes 60
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.func import functional_call

from bench.abacus.drill import drill
from bench.abacus.muon import Muon
from bench.abacus.network import Network, Shape
from bench.abacus.problems import PLAIN, Habits, sample
from bench.abacus.vocabulary import Example, build, example

BATCHES = 64  # of a pool
BATCH_TOKENS = 4096
LEAST, MOST = 50, 400  # tokens of a chain
VOCABULARY = 320  # the tokenizer's 314, in multiples of 64


@dataclass(frozen=True)
class Recipe:
    """What makes a model: its shape and how long it learns. Rates are peaks."""

    shape: Shape
    pools: int
    seed: int = 0
    matrix_rate: float = 0.02
    other_rate: float = 3e-3
    short: float = 0.2  # of the pools: with chains of at most 100 tokens
    grown: float = 0.45  # of the pools: until chains have their full length
    warm: float = 0.01
    decay: float = 0.5  # the last part, over which rates fall to zero
    stop: float = 1.0  # of the pools: where learning ends, for a helper that is to err
    habits: Habits = PLAIN

    def longest(self, pool: int) -> int:
        """Tokens of the longest chains of a pool."""
        share = (pool / self.pools - self.short) / (self.grown - self.short)
        return round(100 + (MOST - 100) * min(max(share, 0.0), 1.0))

    def drills(self, pool: int) -> float:
        """The share of drills among a pool's sequences."""
        return 0.5 if pool < self.short * self.pools else 0.05

    def rate(self, done: float) -> float:
        """The learning rate's factor when that share of the pools is done."""
        return min(1.0, (done + 1e-4) / self.warm, (1 - done) / self.decay)


RECIPES = {
    "abacus": Recipe(
        Shape(VOCABULARY, 4, 256, 512, 4, 2, 64),
        pools=90,
        habits=Habits(checks=0.7, slips=0.1, retold=0.25),
    ),
    "abacus-small": Recipe(
        Shape(VOCABULARY, 4, 128, 256, 4, 2, 64), pools=60, seed=1, short=0.3, grown=0.5, stop=0.56
    ),
}


class Batch:
    """Sequences of like length, padded: tokens [B, T], learned [B, T]."""

    def __init__(self, examples: list[Example]) -> None:
        width = max(len(e.tokens) for e in examples)
        self.tokens = torch.zeros(len(examples), width, dtype=torch.int64)
        self.learned = torch.zeros(len(examples), width, dtype=torch.bool)
        for row, e in enumerate(examples):
            self.tokens[row, : len(e.tokens)] = torch.tensor(e.tokens)
            self.learned[row, : len(e.tokens)] = torch.tensor(e.learned)

    def logits(self, network: Network) -> tuple[Tensor, Tensor]:
        """Of every learned token, [n, vocabulary], and the tokens, [n]. In bfloat16 throughout;
        the parameters, which the optimisers see, stay float32."""
        chosen = self.learned[:, 1:]
        parameters = {name: p.bfloat16() for name, p in network.named_parameters()}
        logits = functional_call(network, parameters, (self.tokens[:, :-1], chosen))
        return logits.float(), self.tokens[:, 1:][chosen]

    def to(self, device: torch.device) -> Batch:
        self.tokens, self.learned = self.tokens.to(device), self.learned.to(device)
        return self


def pool(tokenizer: Tokenizer, name: str, index: int) -> list[Batch]:
    """A recipe's fresh problems in batches of like length, in random order; some are drills."""
    recipe = RECIPES[name]
    longest, drills = recipe.longest(index), recipe.drills(index)
    rng = Random(f"{name} {recipe.seed} {index}")
    examples, total = [], 0
    while total < BATCHES * BATCH_TOKENS:
        if rng.random() < drills:
            examples.append(drill(tokenizer, rng, rng.randint(LEAST, longest)))
        else:
            problem = sample(rng, None, LEAST, longest, recipe.habits)
            examples.append(example(tokenizer, problem))
        total += len(examples[-1].tokens)
    examples.sort(key=lambda e: len(e.tokens))
    made = [Batch(part) for part in _runs(examples)]
    rng.shuffle(made)
    return made


def _runs(examples: list[Example]) -> Iterator[list[Example]]:
    """Consecutive examples whose padded tokens fill a batch."""
    part: list[Example] = []
    for e in examples:
        if part and len(e.tokens) * (len(part) + 1) > BATCH_TOKENS:
            yield part
            part = []
        part.append(e)
    yield part


def held_out(tokenizer: Tokenizer) -> list[Batch]:
    """Plain chains that no pool has: their seed is another."""
    rng = Random("held out")
    examples = [example(tokenizer, sample(rng, None, LEAST, MOST, PLAIN)) for _ in range(200)]
    blank = tokenizer.encode("\n\n").ids[0]
    for e in examples:  # whether to re-check, after the last line, is free
        *_, last, _ = (index for index, token in enumerate(e.tokens) if token == blank)
        e.learned[last + 1] = False
    return [Batch(part) for part in _runs(sorted(examples, key=lambda e: len(e.tokens)))]


class Trainer:
    """A network, its optimisers, and how far they have come."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.network = Network(recipe.shape).to(device)
        named = list(self.network.layers.named_parameters())
        matrices = [p for _, p in named if p.ndim == 2]
        others = [p for p in self.network.parameters() if not any(p is m for m in matrices)]
        self.optimisers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=recipe.matrix_rate),
            torch.optim.AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = [recipe.matrix_rate, recipe.other_rate]
        self.pools = 0
        self.tokens = 0
        self.seconds = 0.0

    def learn(self, batches: list[Batch]) -> float:
        """One pool; the mean loss."""
        started, losses = time.perf_counter(), []
        for index, batch in enumerate(batches):
            done = (self.pools + index / len(batches)) / self.recipe.pools
            for optimiser, peak in zip(self.optimisers, self.peaks, strict=True):
                optimiser.param_groups[0]["lr"] = peak * self.recipe.rate(done)
            logits, wanted = batch.to(self.device).logits(self.network)
            loss = F.cross_entropy(logits, wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            for optimiser in self.optimisers:
                optimiser.step()
                optimiser.zero_grad()
            losses.append(loss.item())
            self.tokens += len(wanted)
        self.pools += 1
        self.seconds += time.perf_counter() - started
        return sum(losses) / len(losses)

    @torch.no_grad()
    def exact(self, batches: list[Batch]) -> float:
        """The share of sequences in which every learned token is the likeliest."""
        right = total = 0
        for batch in batches:
            logits, wanted = batch.to(self.device).logits(self.network)
            wrong = torch.zeros_like(batch.learned[:, 1:])
            wrong[batch.learned[:, 1:]] = logits.argmax(-1) != wanted
            right += int((~wrong.any(-1)).sum())
            total += len(wrong)
        return right / total

    def save(self, path: Path) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "network": self.network.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "progress": (self.pools, self.tokens, self.seconds),
        }
        torch.save(state, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{path} was made by another recipe; remove it to start anew")
        self.network.load_state_dict(state["network"])
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        self.pools, self.tokens, self.seconds = state["progress"]


def train(name: str, folder: Path, device: torch.device, until: float) -> bool:
    """Train one model as long as there is time; whether it is complete."""
    recipe = RECIPES[name]
    trainer = Trainer(recipe, device)
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = place / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    tokenizer = build()
    test = held_out(tokenizer)
    while trainer.pools < recipe.stop * recipe.pools:
        if time.monotonic() > until:
            return False
        longest = recipe.longest(trainer.pools)
        loss = trainer.learn(pool(tokenizer, name, trainer.pools))
        row = {
            "pool": trainer.pools,
            "longest": longest,
            "loss": round(loss, 5),
            "exact": trainer.exact(test),
            "tokens": trainer.tokens,
            "seconds": round(trainer.seconds, 1),
        }
        with (place / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(name, json.dumps(row), flush=True)
        trainer.save(checkpoint)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", default=list(RECIPES), help=", ".join(RECIPES))
    parser.add_argument("--folder", type=Path, default=Path("build/abacus"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    for name in options.models:
        if name not in RECIPES:
            parser.error(f"models must be of {', '.join(RECIPES)}, not {name!r}")
    if options.threads:
        torch.set_num_threads(options.threads)
    until = time.monotonic() + 60 * options.minutes
    for name in options.models:
        train(name, options.folder, torch.device(options.device), until)


if __name__ == "__main__":
    main()
