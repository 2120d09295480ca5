"""Drills: names given values over and over, of which only what can be recalled is learned.

A chain's recalls are a fifth of its tokens, too few to find out soon how recalling is done; half of
a drill's are.
"""

from __future__ import annotations

from random import Random

from tokenizers import Tokenizer

from bench.abacus.problems import LETTERS
from bench.abacus.vocabulary import Example

NEW = 0.15
"""The chance that a name gets a new value rather than its last one."""


def drill(tokenizer: Tokenizer, rng: Random, tokens: int) -> Example:
    """`name=value` a third of `tokens` times, names from a few."""
    names = rng.sample(LETTERS, rng.randint(2, 12))
    values: dict[str, int] = {}
    ids = tokenizer.encode("<think>\n").ids
    learned = [False] * len(ids)
    for _ in range(tokens // 3):
        name = rng.choice(names)
        recalled = name in values and rng.random() > NEW
        if not recalled:
            values[name] = rng.randint(0, 9)
        ids += tokenizer.encode(f" {name}={values[name]}").ids
        learned += [False, False, recalled]
    return Example(ids, learned)
