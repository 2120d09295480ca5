"""Records to JSON and back, exactly.

A run's summary lies flat at the top, so that `accuracy` or `thinking_tokens_mean` is one look away;
its count of samples is `sample_count` in JSON, since `samples` holds the samples. JSON has no NaN
and no infinity: a value that is one is refused. Readers check every value against the field's type
and pass over keys that they don't know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from bench.evaluation.records import Anatomy, Loop, Run, Sample, Summary, Usage

VERSION = 1

T = TypeVar("T")

_HINTS: dict[type[Any], dict[str, Any]] = {
    kind: get_type_hints(kind) for kind in (Sample, Anatomy, Loop, Summary, Usage)
}


def to_json(run: Run) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold, named by where it is."""
    return {
        "version": VERSION,
        "name": run.name,
        "chain_rule": run.chain_rule,
        **_summary_to_json(run.summary, "summary"),
        "settings": _plain(run.settings, "settings"),
        "environment": _plain(run.environment, "environment"),
        "tasks": {t: _summary_to_json(s, f"tasks.{t}") for t, s in run.tasks.items()},
        "samples": [_plain(s, f"samples[{i}]") for i, s in enumerate(run.samples)],
    }


def from_json(data: object, source: str) -> Run:
    """ValueError: what was read from `source` is no such run; says what is wrong and where."""
    try:
        return _run(_mapping(data, "its content"))
    except ValueError as error:
        raise ValueError(f"{source} isn't a record of a run: {error}") from None


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold."""
    plain: dict[str, Any] = _plain(sample, "sample")
    return plain


def sample_from_json(data: object, source: str = "a line") -> Sample:
    """ValueError: what was read from `source` is no sample."""
    return _one(Sample, data, source, "sample")


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold."""
    plain: dict[str, Any] = _plain(usage, "usage")
    return plain


def usage_from_json(data: object, source: str = "a line") -> Usage:
    """ValueError: what was read from `source` is no usage."""
    return _one(Usage, data, source, "usage")


def _one(kind: type[T], data: object, source: str, name: str) -> T:
    try:
        made: T = _construct(kind, data, name)
    except ValueError as error:
        raise ValueError(f"{source} isn't a record of a {name}: {error}") from None
    return made


def _run(data: Mapping[str, Any]) -> Run:
    if data.get("version") != VERSION:
        raise ValueError(f"version must be {VERSION}, is {data.get('version')!r}")
    tasks = _mapping(data.get("tasks"), "tasks")
    summaries = {name: _summary(task, f"tasks.{name}") for name, task in tasks.items()}
    samples = _read(tuple[Sample, ...], data.get("samples"), "samples")
    _check_samples(samples, summaries)
    return Run(
        name=_read(str, data.get("name"), "name"),
        chain_rule=_read(str, data.get("chain_rule"), "chain_rule"),
        settings=_read(Mapping[str, Any], data.get("settings"), "settings"),
        environment=_read(Mapping[str, Any], data.get("environment"), "environment"),
        summary=_summary(data, ""),
        tasks=summaries,
        samples=samples,
    )


def _check_samples(samples: tuple[Sample, ...], tasks: Mapping[str, Summary]) -> None:
    seen = set()
    for i, sample in enumerate(samples):
        if sample.task not in tasks:
            raise ValueError(f"samples[{i}].task {sample.task!r} is not one of tasks")
        if sample.key in seen:
            raise ValueError(f"samples[{i}] is there twice: {sample.key}")
        seen.add(sample.key)


def _summary_to_json(summary: Summary, at: str) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(summary, at)
    return {"sample_count" if key == "samples" else key: value for key, value in plain.items()}


def _summary(data: object, at: str) -> Summary:
    held = dict(_mapping(data, at))
    if "sample_count" not in held:
        raise ValueError(f"{_join(at, 'sample_count')} is missing")
    held["samples"] = held["sample_count"]
    summary: Summary = _construct(Summary, held, at)
    return summary


def _plain(value: Any, at: str) -> Any:
    """Of dicts, lists and what JSON holds in them."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        return {name: _plain(getattr(value, name), _join(at, name)) for name in names}
    if isinstance(value, Mapping):
        return {_key(key, at): _plain(item, _join(at, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{at}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float):
        return _finite(value, at)
    if value is None or isinstance(value, str | int):
        return value
    raise ValueError(f"{at} must be something that JSON holds, is {value!r}")


def _key(key: object, at: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{at} must have keys of text, has {key!r}")
    return key


def _finite(value: float, at: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{at} must be a finite number, is {value}")
    return value


def _construct(kind: type[Any], data: object, at: str) -> Any:
    held, hints = _mapping(data, at), _HINTS[kind]
    missing = [name for name in hints if name not in held]
    if missing:
        raise ValueError(f"{_join(at, missing[0])} is missing")
    return kind(**{name: _read(hint, held[name], _join(at, name)) for name, hint in hints.items()})


def _read(hint: Any, value: Any, at: str) -> Any:
    """The value, if it is what the type says; lists become tuples, whole numbers floats."""
    if hint is Any:
        return _plain(value, at)
    if is_dataclass(hint) and isinstance(hint, type):
        return _construct(hint, value, at)
    origin, args = get_origin(hint), get_args(hint)
    if origin is None:
        return _scalar(hint, value, at)
    if origin is UnionType:
        (inner,) = (arg for arg in args if arg is not NoneType)
        return None if value is None else _read(inner, value, at)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{at} must be one of {', '.join(args)}, is {value!r}")
        return value
    if origin is tuple:
        return _read_tuple(args, value, at)
    return {key: _read(args[1], item, _join(at, key)) for key, item in _mapping(value, at).items()}


def _read_tuple(args: tuple[Any, ...], value: Any, at: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{at} must be a list, is {value!r}")
    hints = args[:1] * len(value) if args[-1] is Ellipsis else args
    if len(value) != len(hints):
        raise ValueError(f"{at} must have {len(hints)} values, has {len(value)}")
    return tuple(
        _read(hint, item, f"{at}[{i}]")
        for i, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def _scalar(kind: type[Any], value: Any, at: str) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{at} must be {_NAMES[kind]}, is {value!r}")
    return _finite(value, at) if kind is float else value


_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


def _mapping(value: object, at: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{at} must be an object, is {value!r}")
    return value


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
