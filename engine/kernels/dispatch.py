"""One op, several backends: each says why it can't serve a spec, and the choice is made once.

The reference (plain torch) is an op's definition and refuses nothing. `select` is called at
construction, so a spec that no backend serves fails there with every backend's reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

Spec = TypeVar("Spec")


class NoBackend(ValueError):
    """No backend serves a spec; the message has every backend's reason."""


@dataclass(frozen=True)
class Impl(Generic[Spec]):
    """A backend's implementation of an op: `build(spec, ...)` gives the callable or object."""

    backend: str
    build: Callable[..., Any]
    refuses: Callable[[Spec], str | None]


@dataclass
class Op(Generic[Spec]):
    """A named operation and the backends that registered for it, best first."""

    name: str
    impls: list[Impl[Spec]] = field(default_factory=list)

    def register(
        self, backend: str, refuses: Callable[[Spec], str | None]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: add a backend in front of those registered before it."""

        def add(build: Callable[..., Any]) -> Callable[..., Any]:
            self.impls.insert(0, Impl(backend, build, refuses))
            return build

        return add

    def reasons(self, spec: Spec) -> list[tuple[str, str | None]]:
        """Every backend with its refusal (None: it would serve), best first."""
        return [(impl.backend, impl.refuses(spec)) for impl in self.impls]


def select(op: Op[Spec], spec: Spec, prefer: Sequence[str] = ()) -> Impl[Spec]:
    """The first backend that doesn't refuse; those named in `prefer` are asked first, in order."""
    ranked = sorted(
        op.impls, key=lambda i: prefer.index(i.backend) if i.backend in prefer else len(prefer)
    )
    refused: list[str] = []
    for impl in ranked:
        reason = impl.refuses(spec)
        if reason is None:
            log.debug(
                "%s: %s%s", op.name, impl.backend, f" ({'; '.join(refused)})" if refused else ""
            )
            return impl
        refused.append(f"{impl.backend}: {reason}")
    raise NoBackend(f"no backend for {op.name}: " + "; ".join(refused))
