"""Policies by name: `policies/NAME.py` defines one KVPolicy; "name(field=value)" makes it.

Adding a policy means adding its file; nothing else names it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from functools import cache

from engine.cache import policies
from engine.cache.policy import KVPolicy


@cache
def policy_classes() -> dict[str, type[KVPolicy]]:
    """Every policy of the folder by its file's name; a file defines exactly one."""
    found = {}
    for info in pkgutil.iter_modules(policies.__path__):
        module = importlib.import_module(f"{policies.__name__}.{info.name}")
        own = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, KVPolicy)
            and value.__module__ == module.__name__
        ]
        assert len(own) == 1, f"{module.__name__} must define exactly one policy, not {own}"
        found[info.name] = own[0]
    return found


def policy_from_text(text: str) -> KVPolicy:
    """`snapkv` or `snapkv(queries=16)`: a policy with literal fields."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ValueError(f"{text!r} isn't a policy: write name or name(field=value)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} isn't a policy: write name or name(field=value)")
    kind = policy_classes().get(call.func.id)
    if kind is None:
        known = ", ".join(sorted(policy_classes()))
        raise ValueError(f"there is no KV policy {call.func.id!r}; known: {known}")
    return kind(**_fields(kind, call, text))


def _fields(kind: type[KVPolicy], call: ast.Call, text: str) -> dict[str, object]:
    assert dataclasses.is_dataclass(kind)
    known = {f.name for f in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg not in known:
            raise ValueError(f"{text!r}: {keyword.arg} is no field; known: {', '.join(known)}")
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"{text!r}: the value of {keyword.arg} must be a literal") from None
    return values
