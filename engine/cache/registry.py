"""Methods by name: `policies/NAME.py` defines one KVPolicy, `allocations/NAME.py` one Allocation;
"name(field=value)" makes it.

Adding a method means adding its file; nothing else names it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from engine.cache import allocations, policies
from engine.cache.allocation import Allocation
from engine.cache.policy import KVPolicy

T = TypeVar("T")


def policy_classes() -> dict[str, type[KVPolicy]]:
    """Every policy of the folder by its file's name; a file defines exactly one."""
    return _classes(policies, KVPolicy)


def allocation_classes() -> dict[str, type[Allocation]]:
    """Every allocation of the folder by its file's name; a file defines exactly one."""
    return _classes(allocations, Allocation)


def policy_from_text(text: str) -> KVPolicy:
    """`snapkv` or `snapkv(queries=16)`: a policy with literal fields. ValueError says what's wrong
    with the text or with a field."""
    return _made("KV policy", policy_classes(), text)


def allocation_from_text(text: str) -> Allocation:
    """`adakv` or `adakv(safe=0.5)`, as `policy_from_text`."""
    return _made("KV allocation", allocation_classes(), text)


@cache
def _classes(folder: ModuleType, base: type[T]) -> dict[str, type[T]]:
    found = {}
    for info in pkgutil.iter_modules(folder.__path__):
        module = importlib.import_module(f"{folder.__name__}.{info.name}")
        own = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, base)
            and value.__module__ == module.__name__
        ]
        assert len(own) == 1, f"{module.__name__} must define exactly one {base.__name__}"
        found[info.name] = own[0]
    return found


def _made(what: str, classes: dict[str, type[T]], text: str) -> T:
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null byte
        raise ValueError(f"{text!r} isn't a {what}: write name or name(field=value)") from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} isn't a {what}: write name or name(field=value)")
    kind = classes.get(call.func.id)
    if kind is None:
        known = ", ".join(sorted(classes))
        raise ValueError(f"there is no {what} {call.func.id!r}; known: {known}")
    try:
        return kind(**_fields(kind, call))
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}") from None


def _fields(kind: type[object], call: ast.Call) -> dict[str, object]:
    assert dataclasses.is_dataclass(kind)
    hints = get_type_hints(kind)
    known = {f.name: hints[f.name] for f in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for name, node in ((keyword.arg, keyword.value) for keyword in call.keywords):
        if name is None or name not in known:
            raise ValueError(f"there is no field {name or '**'}; known: {', '.join(known)}")
        if name in values:
            raise ValueError(f"{name} is given twice")
        values[name] = _literal(name, node, known[name])
    return values


def _literal(name: str, node: ast.expr, hint: Any) -> object:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError(f"the value of {name} must be a literal") from None
    if not _fits(value, hint):
        wanted = hint.__name__ if isinstance(hint, type) else hint
        raise ValueError(f"{name} must be {wanted}, not {value!r}".replace("typing.", ""))
    return value


def _fits(value: object, hint: Any) -> bool:
    """Whether a literal is of a field's type: a union, a Literal or a plain class."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_args(hint):
        return any(_fits(value, each) for each in get_args(hint))
    return type(value) is hint or (hint is float and type(value) is int)
