"""Records to JSON and back, exactly.

A run's summary lies flat at the top, so that `accuracy` or `thinking_tokens_mean` is one look away.
Readers check every value against the field's type, refuse NaN and infinities, which JSON doesn't
have, and pass over keys that they don't know.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, JsonValue, RootModel, model_validator
from pydantic_core import ValidationError, to_jsonable_python

from bench.evaluation.records import Run, Sample, Summary, Usage

Model = TypeVar("Model", bound=BaseModel)

_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)  # passed on to the dataclasses inside


def _finite(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    json.dumps(value, allow_nan=False)  # what JsonValue doesn't see when it reads text
    return value


_Plain = Annotated[dict[str, JsonValue], AfterValidator(_finite)]


class _Summary(RootModel[Summary]):
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


class _Line(BaseModel):
    model_config = _CONFIG
    sample: Sample
    usage: Usage


def to_json(run: Run) -> dict[str, Any]:
    plain = to_jsonable_python(run)
    return {"version": 1, "name": run.name, **plain.pop("summary"), **plain}


def from_json(text: str | bytes, source: str) -> Run:
    """ValueError: what was read from `source` is no such run; says what is wrong and where."""
    summary = _read(_Summary, text, source, "run").root
    held = dict(_read(_Run, text, source, "run"))
    del held["version"]
    return Run(summary=summary, **held)


def line_to_json(sample: Sample, usage: Usage) -> dict[str, Any]:
    """A line of a record: a sample, and what the run took since the one before."""
    return {"sample": to_jsonable_python(sample), "usage": to_jsonable_python(usage)}


def line_from_json(text: str, source: str) -> tuple[Sample, Usage]:
    """ValueError: what was read from `source` is no line of a record."""
    line = _read(_Line, text, source, "sample")
    return line.sample, line.usage


def _read(model: type[Model], text: str | bytes, source: str, kind: str) -> Model:
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]]
    place = "".join([*steps, ": "]).removeprefix(".") if steps else ""
    reason = first["msg"].removeprefix("Value error, ")
    raise ValueError(f"{source} isn't a record of a {kind}: {place}{reason}")
