"""Wrong types and values, refused in words before anything is queued."""

from collections.abc import Callable
from typing import Any

import pytest

from engine import SamplingParams
from tests.conftest import MakeEngine
from tests.engines import assert_idle, greedy

BAD_PROMPTS = (None, 5, True, b"text", bytearray(b"text"), {"role": "user", "content": "x"}, {1, 2})

BAD_FIELDS: tuple[dict[str, Any], ...] = (
    {"stop": None},
    {"stop": 5},
    {"stop": b"a"},
    {"stop": ["\ud800"]},
    {"stop_token_ids": None},
    {"stop_token_ids": 5},
    {"allowed_token_ids": 5},
    {"allowed_token_ids": "abc"},
    {"allowed_token_ids": [True]},
    {"logit_bias": [1]},
    {"logit_bias": {0: None}},
    {"logit_bias": {0: "x"}},
    {"logit_bias": {1.5: 1}},
    {"n": None},
    {"min_tokens": None},
    {"presence_penalty": None},
    {"ignore_eos": "no"},
    {"skip_special_tokens": None},
)

BAD_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("params", {"params": {"max_tokens": 3}}),
    ("params", {"params": 5}),
    ("id", {"id": 5}),
    ("id", {"id": []}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": float("nan")}),
)


def test_what_is_no_prompt(make_engine: MakeEngine) -> None:
    engine = make_engine()
    calls: tuple[Callable[[Any], object], ...] = (engine.add, engine.stream)
    for prompt in BAD_PROMPTS:
        for call in calls:
            with pytest.raises(ValueError, match="prompt is text"):
                call(prompt)
    for many in (None, 5, b"text", [1.5], [None], {"role": "user", "content": "x"}):
        with pytest.raises(ValueError, match="prompt is text"):
            engine.generate(many)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="params must be"):
        engine.generate([[1, 2]], 5)  # type: ignore[arg-type]
    assert_idle(engine)


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=repr)
def test_fields_of_wrong_types(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


@pytest.mark.parametrize(("name", "given"), BAD_CALLS, ids=repr)
def test_arguments_of_wrong_types(
    name: str, given: dict[str, Any], make_engine: MakeEngine
) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=f"{name} must be"):
        engine.add([1, 2], **given)
    assert_idle(engine)
    assert engine.generate([[1, 2]], greedy(2))[0].finish_reason == "length"


def test_an_id_that_came_into_use_before_a_stream_was_read(make_engine: MakeEngine) -> None:
    engine = make_engine()
    first = engine.prepare([1, 2], greedy(2), id="x")
    engine.add([1, 2], greedy(2), id="x")
    with pytest.raises(ValueError, match="in use"):
        engine.submit(first)
    while engine.has_work():
        engine.step()
    assert_idle(engine)
