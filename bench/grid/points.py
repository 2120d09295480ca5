"""Which runs the grid makes: every KV method at every budget, as options of `bench.quality`.

All methods have the same budget and the same window, half of it, so that equal budgets are equal
peaks. Kara's budget is of each window, and the share of the length that the budget is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PARTS = ("policies", "allocations", "formats")
FULL = "full"

POLICIES = {
    "sinks_recent": "sinks_recent()",
    "snapkv": "snapkv()",
    "rkv": "rkv()",
    "rkv-vases": (
        "rkv(queries={queries}, mix=0.5, kernel=5, pool='mean', group='softmax', threshold=None)"
    ),
    "h2o": "h2o()",
    "tova": "tova()",
    "knorm": "knorm()",
    "keydiff": "keydiff()",
    "vase": "vase()",
    "vase-dkv": "vase(variant='dkv')",
    "am": "am()",
    "tam": "tam()",
    "kara": "kara(recent={recent})",
    "kara-causal": "kara(recent={recent}, bidirectional=False)",
    "kara-ungrown": "kara(recent={recent}, grown=0.0)",
}
"""What is said of a policy, by its name here."""

ALLOCATIONS = {
    "adakv": "adakv()",
    "pyramid": "pyramid()",
    "reasonalloc": "reasonalloc(profile={profile!r})",
    "reasonalloc-layers": "reasonalloc(profile={profile!r}, heads=False)",
    "reasonalloc-heads": "reasonalloc(layers=False)",
}
ALLOCATED = ("snapkv", "rkv")
"""Policies that meet every allocation; uniform ones are of the part "policies"."""

FORMATS = ("bf16", "int8", "int4", "int2")
FORMATTED = ("snapkv",)
"""Policies that meet every format, at the bytes of the budget's bf16 cells."""

CLAIMS = (
    ("snapkv", "sinks_recent"),
    ("rkv", "snapkv"),
    ("vase", "rkv"),
    ("vase", "rkv-vases"),
    ("vase-dkv", "rkv"),
    ("am", "snapkv"),
    ("tam", "am"),
    ("rkv + reasonalloc", "rkv"),
    ("snapkv + reasonalloc", "snapkv"),
    ("rkv + reasonalloc", "rkv + adakv"),
    ("rkv + reasonalloc", "rkv + pyramid"),
    ("snapkv in int8", "snapkv in bf16"),
    ("snapkv in int4", "snapkv in bf16"),
    ("snapkv in int2", "snapkv in bf16"),
    ("kara", "kara-causal"),
    ("kara", "kara-ungrown"),
)
"""Who is better than whom at the same budget, as the papers say."""


class Budget(NamedTuple):
    """`cells` a head, and their share of the `length`, where that is known."""

    label: str
    cells: int
    share: float | None

    @property
    def window(self) -> int:
        return max(8, self.cells // 2)

    @property
    def tail(self) -> int:
        """Plain cells beside packed ones."""
        return min(64, max(16, self.cells // 64 * 16))

    @property
    def kara(self) -> tuple[int, int, int]:
        """Cells kept of a window, the window, and the newest cells, which wait for the next."""
        assert self.share is not None
        window = max(48, round(self.cells / self.share / 96) * 16)  # a sixth of the length
        return max(4, round(self.share * window)), window, window // 4


@dataclass(frozen=True)
class Point:
    """One run. `method` is what tables call it, `flags` are bench.quality's, less the model's."""

    part: str
    method: str
    policy: str | None = None
    budget: Budget | None = None
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.method if self.budget is None else f"{self.method}, {self.budget.label}"

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9_]+", "-", self.name.replace("%", "pc").lower()) + ".json"

    def told(self) -> dict[str, Any]:
        """What its record says of its place in the grid."""
        budget = self.budget
        return {
            "part": self.part,
            "method": self.method,
            "budget": budget and budget.label,
            "cells": budget and budget.cells,
        }


def budget_of(text: str, length: int | None) -> Budget:
    """ "64" cells a head, or "20%" of the typical length of prompt and chain."""
    number = text.removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"a budget is cells, as 64, or a share, as 20%; not {text!r}") from None
    if number == text:
        if value < 4 or value != int(value):
            raise ValueError(f"a budget must be at least 4 whole cells, not {text}")
        return Budget(text, int(value), length and min(1.0, value / length))
    if length is None:
        raise ValueError(f"{text} of what? give --length, tokens of a typical prompt and chain")
    if not 0 < value < 100:
        raise ValueError(f"a share must be above 0 and below 100 %, not {text}")
    return Budget(text, max(4, round(value / 100 * length)), value / 100)


def points(
    budgets: Sequence[Budget],
    *,
    parts: Sequence[str] = PARTS,
    policies: Sequence[str] | None = None,
    cell_bytes: int,
    profile: str,
) -> Iterator[Point]:
    """The full cache first, then part by part. `cell_bytes` are one bf16 cell's in every head,
    `profile` the file of reasonalloc's; `policies` None: all."""
    chosen = list(POLICIES) if policies is None else policies
    if unknown := sorted(set(chosen) - set(POLICIES)):
        raise ValueError(f"no policy here is called {unknown[0]}; known: {', '.join(POLICIES)}")
    yield Point(FULL, FULL)
    for part in parts:
        for budget in budgets:
            for policy in chosen:
                yield from _of(part, policy, budget, cell_bytes, profile)
    if "formats" in parts:
        for name in FORMATS[1:]:
            yield Point(
                "formats", f"full in {name}", flags=("--kv-format", name, "--kv-tail", "16")
            )


def _of(part: str, policy: str, budget: Budget, cell_bytes: int, profile: str) -> Iterator[Point]:
    if part == "policies":
        if policy.startswith("kara") and budget.share is None:
            raise ValueError("kara keeps a share of each window: give --length, or other policies")
        yield Point(part, policy, policy, budget, policy_flags(policy, budget))
    if part == "allocations" and policy in ALLOCATED:
        for name, text in ALLOCATIONS.items():
            flags = (*policy_flags(policy, budget), "--kv-allocation", text.format(profile=profile))
            yield Point(part, f"{policy} + {name}", policy, budget, flags)
    if part == "formats" and policy in FORMATTED:
        for name in FORMATS:
            flags = (*_policy(policy, budget), *_window(budget.window))
            flags += ("--kv-budget-bytes", str(cell_bytes * budget.cells), "--kv-format", name)
            flags += ("--kv-tail", str(budget.tail), "--kv-tail-format", "bf16")
            yield Point(part, f"{policy} in {name}", policy, budget, flags)


def policy_flags(policy: str, budget: Budget) -> tuple[str, ...]:
    """A policy at a budget, in cells of the model's own kind."""
    cells, window = budget.cells, budget.window
    if policy.startswith("kara"):
        cells, window, _ = budget.kara
    return (*_policy(policy, budget), "--kv-budget", str(cells), *_window(window))


def _policy(policy: str, budget: Budget) -> tuple[str, str]:
    recent = budget.kara[2] if policy.startswith("kara") else 0
    text = POLICIES[policy].format(queries=min(64, budget.cells // 2), recent=recent)
    return "--kv-policy", text


def _window(cells: int) -> tuple[str, str]:
    return "--kv-window", str(cells)
