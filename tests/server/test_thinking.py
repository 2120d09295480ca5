"""Every spelling of thinking budgets, switches and efforts, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model.template import variables_of
from engine.server.errors import FieldError
from engine.server.thinking import (
    BUDGETS,
    EFFORTS,
    PLACES,
    Abilities,
    ThinkingPlan,
    ThinkingRequest,
    parse_efforts,
    plan_thinking,
    read_thinking,
    template_variables,
)

MARKED = Abilities(True)
SWITCHED = Abilities(True, frozenset(("messages", "enable_thinking")))
PLAIN = Abilities(False, frozenset(("messages",)))


def at(place: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(place.split(".") if place else []):
        fields = {name: fields}
    return fields


EVERYWHERE = ("", *PLACES, "extra_body.chat_template_kwargs", "extra_body.custom_params")


@pytest.mark.parametrize("place", EVERYWHERE)
@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        *[({name: 512}, ThinkingRequest(budget=512)) for name in BUDGETS],
        ({"reasoning": {"max_tokens": 7}}, ThinkingRequest(budget=7)),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            ThinkingRequest(budget=9, enable=True),
        ),
        ({"thinking": {"type": "disabled"}}, ThinkingRequest(enable=False)),
        ({"enable_thinking": False}, ThinkingRequest(enable=False)),
        ({"thinking": True}, ThinkingRequest(enable=True)),
        ({"think": True}, ThinkingRequest(enable=True)),
        ({"think": "low"}, ThinkingRequest(effort="low")),
        ({"reasoning_effort": "high"}, ThinkingRequest(effort="high")),
        (
            {"reasoning": {"effort": "low", "exclude": True}},
            ThinkingRequest(effort="low", show=False),
        ),
        ({"reasoning": {"enabled": True, "max_tokens": None}}, ThinkingRequest(enable=True)),
        ({"include_reasoning": False}, ThinkingRequest(show=False)),
        ({"thinking_token_budget": -1}, ThinkingRequest(budget=-1)),
        (
            {"thinking_token_budget": 0, "enable_thinking": False},
            ThinkingRequest(budget=0, enable=False),
        ),
        (
            {"reasoning_effort": "none", "thinking_budget": 0},
            ThinkingRequest(budget=0, effort="none"),
        ),
        ({"thinking_token_budget": None, "think": None, "reasoning": None}, ThinkingRequest()),
        ({"temperature": 1.0, "unknown": {"budget": 3}}, ThinkingRequest()),
    ],
)
def test_every_spelling_at_every_place(
    place: str, fields: dict[str, Any], asked: ThinkingRequest
) -> None:
    assert read_thinking(at(place, fields)) == asked


def test_the_same_said_twice_is_once() -> None:
    body = {"thinking_budget": 5, "extra_body": {"chat_template_kwargs": {"reasoning_budget": 5}}}
    assert read_thinking(body) == ThinkingRequest(budget=5)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"thinking_budget": 5.0}, "thinking_budget"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"reasoning": "low"}, "reasoning"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"thinking": {"budget_tokens": 3}}, "thinking.type"),
        ({"thinking": {"type": "adaptive"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget": 3}}, "thinking.budget"),
        ({"custom_params": {"thinking_budget": []}}, "custom_params.thinking_budget"),
    ],
)
def test_wrong_values_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(FieldError) as error:
        read_thinking(body)
    assert error.value.param == param
    assert str(error.value).startswith(param + ": ")


@pytest.mark.parametrize(
    "body",
    [
        {"thinking_budget": 5, "reasoning_budget": 6},
        {"thinking_budget": 5, "chat_template_kwargs": {"thinking_budget": -1}},
        {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"reasoning_effort": "low", "thinking_budget": 5},
        {"reasoning_effort": "none", "thinking_budget": 5},
        {"reasoning_effort": "none", "enable_thinking": True},
        {"reasoning_effort": "low", "enable_thinking": False},
        {"thinking_budget": 5, "enable_thinking": False},
        {"thinking_budget": 0, "enable_thinking": True},
        {"include_reasoning": True, "reasoning": {"exclude": True}},
    ],
)
def test_contradictions_name_both(body: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=r"contradicts .*give one of them"):
        read_thinking(body)


def test_plans() -> None:
    def plan(abilities: Abilities = SWITCHED, **asked: Any) -> ThinkingPlan:
        return plan_thinking(ThinkingRequest(**asked), abilities)

    assert plan() == (None, {})
    assert plan(budget=5) == (5, {})
    assert plan(budget=0) == (0, {})
    assert plan(budget=-1) == (None, {})
    assert plan(enable=False) == (0, {"enable_thinking": False})
    assert plan(effort="none") == (0, {"enable_thinking": False})
    assert plan(MARKED, enable=False) == (0, {})
    assert plan(PLAIN, enable=False) == (None, {})
    assert plan(enable=True, budget=9) == (9, {"enable_thinking": True})
    assert plan(MARKED, enable=True) == (None, {})
    assert plan(effort="low") == (EFFORTS["low"], {"enable_thinking": True})
    assert plan(effort="xhigh") == (None, {"enable_thinking": True})
    own = Abilities(True, frozenset(("reasoning_effort", "thinking")))
    assert plan(own, effort="low") == (1024, {"thinking": True, "reasoning_effort": "low"})
    assert plan(PLAIN, budget=5) == (5, {}), "its chain is told by the answer marker"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (ThinkingRequest(enable=True), "enable_thinking: .*no thinking of its own"),
        (ThinkingRequest(effort="low"), "reasoning_effort: .*no thinking of its own"),
        (ThinkingRequest(effort="huge"), "must be one of none, minimal, low, medium, high, xhigh"),
    ],
)
def test_what_a_plain_model_cannot_do_is_refused(asked: ThinkingRequest, words: str) -> None:
    with pytest.raises(FieldError, match=words):
        plan_thinking(asked, PLAIN)


VALUES = st.sampled_from((None, -1, 0, 64, True, False, "low", "none", {}, {"effort": "low"}))
FIELDS = st.dictionaries(
    st.sampled_from(
        (*BUDGETS, "thinking", "think", "enable_thinking", "reasoning_effort", "reasoning")
    ),
    VALUES,
    max_size=3,
)


@given(FIELDS, FIELDS, st.sampled_from((MARKED, SWITCHED, PLAIN)))
def test_never_ignored(top: dict[str, Any], inner: dict[str, Any], abilities: Abilities) -> None:
    """Whatever is given is refused, or shows in the plan, or is what the model does anyway."""
    try:
        asked = read_thinking({**top, "chat_template_kwargs": inner})
        plan = plan_thinking(asked, abilities)
    except FieldError:
        return
    for name, value in (*top.items(), *inner.items()):
        if value is None or value == {}:
            continue
        if value is True:
            assert plan.budget != 0
        elif value is False or value == "none":
            assert plan.budget == (0 if abilities.markers else None)
        elif name in BUDGETS:
            none_anyway = value == 0 and not abilities.markers  # switched off besides
            assert plan.budget == (None if value == -1 else value) or none_anyway
        else:
            assert plan.budget == EFFORTS["low"]


def test_the_rest_of_the_template_s_variables() -> None:
    abilities = Abilities(True, frozenset(("messages", "custom", "enable_thinking")))
    body = {
        "chat_template_kwargs": {"custom": 1, "enable_thinking": True, "gone": None},
        "extra_body": {"chat_template_kwargs": {"custom": 2, "thinking_budget": 3}},
    }
    assert template_variables(body, abilities) == {"custom": 1}
    assert template_variables({}, abilities) == {}
    for name in ("messages", "unread"):
        with pytest.raises(FieldError, match=f"chat_template_kwargs.{name}"):
            template_variables({"chat_template_kwargs": {name: 1}}, abilities)


def test_what_a_template_reads() -> None:
    qwen = "{% if enable_thinking is defined and enable_thinking is false %}<think>{% endif %}"
    assert variables_of(qwen) == {"enable_thinking"}
    late = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}"
    assert "thinking" in variables_of(late)
    loop = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert variables_of(loop) == {"messages"}
    with pytest.raises(ValueError, match="chat template, line 1"):
        variables_of("{% if %}")


def test_efforts_are_settable() -> None:
    assert parse_efforts("low=5, high=none,mine=7") == {
        **EFFORTS,
        "low": 5,
        "high": None,
        "mine": 7,
    }
    assert parse_efforts("") == EFFORTS
    for text in ("low", "low=", "=5", "low=x", "none=5", "low=-1"):
        with pytest.raises(ValueError, match="must be an effort and its tokens"):
            parse_efforts(text)
