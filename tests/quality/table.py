"""Configurations of the engine, and how far each may be from the full one.

On 200 problems of the abacus with short chains, greedy, paired with the full engine problem by
problem. A method adds a line; `python -m tests.quality.measure` says what its band should be, and
`--write` puts it in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bench.abacus.asking import ask, limit_for
from bench.abacus.task import Abacus
from engine import Engine, EngineConfig, KVSpec, ModelSpec
from engine.cache.policies.sinks_recent import SinksRecent
from engine.cache.policies.snapkv import SnapKV
from engine.cache.policy import KVPolicy
from engine.scheduler.controller import Controller

TASK = Abacus(min_tokens=50, max_tokens=150)
PROBLEMS = TASK.make("abacus", 200, seed=2026)


class Row(NamedTuple):
    """`low` to `high` is the band of its accuracy less the full engine's; full's own: of its
    accuracy."""

    name: str
    low: float
    high: float
    config: EngineConfig


def row(
    name: str,
    low: float,
    high: float,
    *,
    helper: ModelSpec | None = None,
    controllers: tuple[Controller, ...] = (),
    **main: Any,
) -> Row:
    """`main` is ModelSpec's, of the model `abacus`."""
    models = {"main": ModelSpec("abacus", **main)}
    if helper is not None:
        models["helper"] = helper
    return Row(name, low, high, EngineConfig(models=models, controllers=controllers, threads=1))


def kv(policy: KVPolicy, budget: int, window: int) -> KVSpec:
    return KVSpec(policy=policy, budget_tokens=budget, window=window)


FULL = row("full", 0.94, 0.99)
ROWS = (
    row("sinks_recent 96 + 32", -0.61, -0.47, kv=kv(SinksRecent(), 96, 32)),
    row("sinks_recent 48 + 16", -0.96, -0.87, kv=kv(SinksRecent(), 48, 16)),
    row("snapkv 96 + 32", -0.53, -0.38, kv=kv(SnapKV(), 96, 32)),
    row("rtn8", -0.02, 0.02, weights="rtn8"),
    row("rtn4", -0.02, 0.02, weights="rtn4"),
    row("rtn3", -0.01, 0.03, weights="rtn3"),
)


def verdicts(of: Row) -> list[bool]:
    """Which problems it got right."""
    with Engine(of.config) as engine:
        answers = ask(engine, PROBLEMS, max_tokens=limit_for(TASK.max_tokens))
    return [answer.right for answer in answers]
