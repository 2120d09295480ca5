"""Records to JSON and back, exactly.

A run's summary lies flat at the top, so that `accuracy` or `thinking_tokens_mean` is one look away.
Readers check every value against the field's type, refuse NaN and infinities, which JSON doesn't
have, and pass over keys that they don't know. What is written is read first, so that it can be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, RootModel, model_validator
from pydantic_core import ValidationError, to_jsonable_python

from bench.evaluation.records import Run, Sample, Summary, Usage

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)  # passed on to the dataclasses inside


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    json.dumps(value, allow_nan=False)  # what JsonValue doesn't see when it reads text
    return value


_Plain = Annotated[dict[str, JsonValue], AfterValidator(_finite)]


class _One(RootModel[T], Generic[T]):
    model_config = _CONFIG


class _Run(BaseModel):
    """What lies beside the flat summary."""

    model_config = _CONFIG
    version: Literal[1]
    name: str
    chain_rule: str
    settings: _Plain
    environment: _Plain
    tasks: dict[str, Summary]
    samples: tuple[Sample, ...]

    @model_validator(mode="after")
    def _samples_are_of_tasks_and_once(self) -> Self:
        seen = set()
        for i, sample in enumerate(self.samples):
            if sample.task not in self.tasks:
                raise ValueError(f"samples[{i}].task {sample.task!r} is not one of tasks")
            if sample.key in seen:
                raise ValueError(f"samples[{i}] is there twice: {sample.key}")
            seen.add(sample.key)
        return self


def to_json(run: Run) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold, named by where it is."""
    plain = to_jsonable_python(run)
    data = {"version": 1, "name": run.name, **plain.pop("summary"), **plain}
    from_json(json.dumps(data), run.name)
    return data


def from_json(text: str | bytes, source: str) -> Run:
    """ValueError: what was read from `source` is no such run; says what is wrong and where."""
    summary = _read(_One[Summary], text, source, "run").root
    held = dict(_read(_Run, text, source, "run"))
    del held["version"]
    return Run(summary=summary, **held)


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold."""
    return _written(sample, sample_from_json)


def sample_from_json(data: object, source: str = "a line") -> Sample:
    """ValueError: what was read from `source` is no sample."""
    return _read(_One[Sample], json.dumps(data), source, "sample").root


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """ValueError: a value that JSON can't hold."""
    return _written(usage, usage_from_json)


def usage_from_json(data: object, source: str = "a line") -> Usage:
    """ValueError: what was read from `source` is no usage."""
    return _read(_One[Usage], json.dumps(data), source, "usage").root


def _written(value: T, read: Callable[[object, str], T]) -> dict[str, Any]:
    plain: dict[str, Any] = to_jsonable_python(value)
    read(plain, "what is to be written")
    return plain


def _read(model: type[Model], text: str | bytes, source: str, kind: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    place = "".join([*steps, ": "]).removeprefix(".") if steps else ""
    reason = first["msg"].removeprefix("Value error, ")
    raise ValueError(f"{source} isn't a record of a {kind}: {place}{reason}")
