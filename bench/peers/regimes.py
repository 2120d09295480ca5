"""What is raced for: each regime a frozen value, each measure a small function of timings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from bench.peers.peer import Timing

Generate = Callable[[int], Timing]
"""Runs fresh prompts of the regime's size to so many output tokens each."""

FIRST_TOKEN_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How a figure comes from timings. `take` None: it belongs to a fresh process, see match.py."""

    unit: str
    better: Literal["higher", "lower"]
    take: Callable[[Regime, Generate], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """`streams` prompts of `prompt_tokens` at once, `output_tokens` each.

    `bits`: only configurations that hold weights in so many bits take part; None: all.
    """

    name: str
    title: str
    measure: str
    streams: int = 1
    prompt_tokens: int = 32
    output_tokens: int = 256
    bits: int | None = None

    @property
    def how(self) -> Measure:
        return MEASURES[self.measure]

    @property
    def context_tokens(self) -> int:
        """Of one stream, prompt and output."""
        return self.prompt_tokens + self.output_tokens


def _decode(regime: Regime, generate: Generate) -> float:
    """Tokens a second after the first one of each stream.

    Where an engine doesn't say when its first token came, other prompts of the same size are run to
    one token.
    """
    whole = generate(regime.output_tokens)
    first = whole.first_seconds
    if first is None:
        first = generate(1).seconds
    if first >= whole.seconds:
        raise ValueError(
            f"the first of {regime.output_tokens} tokens took {first:.4f} s and all of them "
            f"{whole.seconds:.4f} s: there is no speed of decoding in that"
        )
    return regime.streams * (regime.output_tokens - 1) / (whole.seconds - first)


def _output(regime: Regime, generate: Generate) -> float:
    """Output tokens a second, the reading of the prompts included."""
    return regime.streams * regime.output_tokens / generate(regime.output_tokens).seconds


def _prompt(regime: Regime, generate: Generate) -> float:
    """Prompt tokens a second up to the first output token."""
    return regime.streams * regime.prompt_tokens / generate(1).seconds


def _first(regime: Regime, generate: Generate) -> float:
    """Milliseconds; the median of a few, since one is over in no time."""
    return 1e3 * statistics.median(generate(1).seconds for _ in range(FIRST_TOKEN_TRIES))


MEASURES: Mapping[str, Measure] = {
    "decode": Measure(unit="tokens/s", better="higher", take=_decode),
    "output": Measure(unit="output tokens/s", better="higher", take=_output),
    "prompt": Measure(unit="prompt tokens/s", better="higher", take=_prompt),
    "first": Measure(unit="ms", better="lower", take=_first),
    "cold": Measure(unit="s", better="lower"),
    "memory": Measure(unit="MiB", better="lower"),
}

_ALL = (
    Regime(name="single", title="one stream, 32 + 256 tokens", measure="decode"),
    Regime(
        name="single-bf16",
        title="one stream, 32 + 256 tokens, 16-bit weights",
        measure="decode",
        bits=16,
    ),
    Regime(name="long", title="one stream, 32 + 2048 tokens", measure="decode", output_tokens=2048),
    Regime(
        name="batch16",
        title="16 streams, 64 + 256 tokens",
        measure="output",
        streams=16,
        prompt_tokens=64,
    ),
    Regime(
        name="batch32",
        title="32 streams, 64 + 256 tokens",
        measure="output",
        streams=32,
        prompt_tokens=64,
    ),
    Regime(
        name="batch64",
        title="64 streams, 16 + 512 tokens",
        measure="output",
        streams=64,
        prompt_tokens=16,
        output_tokens=512,
    ),
    Regime(
        name="prompt2048",
        title="a prompt of 2048 tokens",
        measure="prompt",
        prompt_tokens=2048,
        output_tokens=1,
    ),
    Regime(
        name="first-token",
        title="first token of a 32-token prompt, warm",
        measure="first",
        output_tokens=1,
    ),
    Regime(
        name="cold",
        title="fresh process to first token",
        measure="cold",
        output_tokens=1,
    ),
    Regime(name="memory", title="peak memory, one stream, 32 + 256 tokens", measure="memory"),
)
REGIMES: Mapping[str, Regime] = {regime.name: regime for regime in _ALL}
