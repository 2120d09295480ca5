"""What a request says of thinking, in everybody's words, as one value.

Servers and clients spell the same three wishes in many ways: a budget, on or off, an effort. Every
spelling that is in use is understood at every place where people put it (the body, `extra_body`,
`chat_template_kwargs`, `custom_params`), or refused with its name. Spellings that contradict each
other are refused: none is ever ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from engine.server.errors import FieldError
from engine.server.fields import boolean, known_keys, mapping, one_of

BUDGETS = (
    "thinking_token_budget",
    "thinking_budget_tokens",
    "thinking_budget",
    "reasoning_budget_tokens",
    "reasoning_budget",
    "max_thinking_tokens",
)
"""Flat names of a budget in tokens; -1 asks for none, 0 closes the thinking at once."""

SWITCHES = ("enable_thinking", "thinking", "think")
"""Flat names of on or off. `thinking` may also be Anthropic's object, `think` Ollama's effort."""

EFFORT = "reasoning_effort"

FLAT = frozenset((*BUDGETS, *SWITCHES, EFFORT, "reasoning", "include_reasoning"))
"""All names that are read here, wherever they stand."""

PLACES = ("extra_body", "chat_template_kwargs", "custom_params")

EFFORTS: Mapping[str, int | None] = MappingProxyType(
    {"minimal": 128, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None}
)
"""Tokens of thinking that an effort allows (None: no budget); "none" switches thinking off."""

OFF = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingRequest:
    """What was asked; None: nothing was.

    `budget` in tokens, -1: explicitly none. `enable`: on or off. `effort`: a level of the table, or
    "none". `show`: whether the response has the reasoning's text.
    """

    budget: int | None = None
    enable: bool | None = None
    effort: str | None = None
    show: bool | None = None


class Abilities(NamedTuple):
    """What the served model can be told: whether its thinking has markers, and the variables that
    its chat template reads (none for a plain prompt)."""

    markers: bool
    variables: frozenset[str] = frozenset()


class ThinkingPlan(NamedTuple):
    """For the engine: `SamplingParams.thinking_token_budget`, and variables for the template."""

    budget: int | None
    variables: dict[str, Any]


class _Said(NamedTuple):
    kind: str  # budget, enable, effort or show
    where: str
    value: Any


def read_thinking(body: Mapping[str, Any]) -> ThinkingRequest:
    """Every spelling in the body as one value. FieldError: a wrong value, or a contradiction."""
    said = [each for where, given in places(body) for each in _read(given, where)]
    found = {
        kind: _agreed([each for each in said if each.kind == kind])
        for kind in ("budget", "enable", "effort", "show")
    }
    _check_together(found)
    return ThinkingRequest(**{k: None if v is None else v.value for k, v in found.items()})


def places(body: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where a request's controls may stand: the body, and objects in it."""
    yield prefix, body
    for name in PLACES:
        if body.get(name) is not None:
            where = prefix + name
            yield from places(mapping(body[name], where), where + ".")


def _read(given: Mapping[str, Any], prefix: str) -> Iterator[_Said]:
    for name in given:
        if given[name] is not None and (reader := _READERS.get(name)):
            yield from reader(given[name], prefix + name)


def _budget(value: object, where: str) -> Iterator[_Said]:
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise FieldError(where, f"must be a count of tokens, or -1 for no budget, not {value!r}")
    yield _Said("budget", where, value)


def _switch(value: object, where: str) -> Iterator[_Said]:
    yield _Said("enable", where, boolean(value, where))


def _show(value: object, where: str) -> Iterator[_Said]:
    yield _Said("show", where, boolean(value, where))


def _effort(value: object, where: str) -> Iterator[_Said]:
    if not isinstance(value, str):
        raise FieldError(where, f"must be the name of an effort, not {value!r:.100}")
    yield _Said("effort", where, value)


def _think(value: object, where: str) -> Iterator[_Said]:
    yield from (_effort if isinstance(value, str) else _switch)(value, where)


def _thinking(value: object, where: str) -> Iterator[_Said]:
    """{"type": "enabled", "budget_tokens": 2048}, or a plain boolean."""
    if isinstance(value, bool):
        yield _Said("enable", where, value)
        return
    given = mapping(value, where)
    known_keys(given, ("type", "budget_tokens"), where)
    kind = one_of(given.get("type"), ("enabled", "disabled"), where + ".type")
    yield _Said("enable", where + ".type", kind == "enabled")
    if given.get("budget_tokens") is not None:
        yield from _budget(given["budget_tokens"], where + ".budget_tokens")


def _reasoning(value: object, where: str) -> Iterator[_Said]:
    """{"effort": "low"}, {"max_tokens": 2000}, {"enabled": true}, {"exclude": true}."""
    given = mapping(value, where)
    known_keys(given, tuple(_REASONING), where)
    for name, reader in _REASONING.items():
        if given.get(name) is not None:
            yield from reader(given[name], f"{where}.{name}")


def _hide(value: object, where: str) -> Iterator[_Said]:
    yield _Said("show", where, not boolean(value, where))


_Reader = Callable[[object, str], Iterator[_Said]]
_REASONING: dict[str, _Reader] = {
    "effort": _effort,
    "max_tokens": _budget,
    "enabled": _switch,
    "exclude": _hide,
}
_READERS: dict[str, _Reader] = {
    **dict.fromkeys(BUDGETS, _budget),
    "enable_thinking": _switch,
    "thinking": _thinking,
    "think": _think,
    EFFORT: _effort,
    "reasoning": _reasoning,
    "include_reasoning": _show,
}


def _agreed(said: list[_Said]) -> _Said | None:
    for each in said[1:]:
        if each.value != said[0].value:
            raise _contradiction(said[0], each)
    return said[0] if said else None


def _contradiction(first: _Said, second: _Said) -> FieldError:
    return FieldError(
        second.where,
        f"{second.value!r} contradicts {first.where}={first.value!r}; give one of them",
    )


def _check_together(found: Mapping[str, _Said | None]) -> None:
    """A budget, a switch and an effort that can't all be meant."""
    budget, enable, effort = (found[kind] for kind in ("budget", "enable", "effort"))
    if effort is not None and budget is not None and (effort.value, budget.value) != (OFF, 0):
        raise _contradiction(effort, budget)
    for each in (budget, effort):
        if each is not None and enable is not None:
            off = each.value in (0, OFF)
            if off is enable.value:
                raise _contradiction(enable, each)


def plan_thinking(
    asked: ThinkingRequest,
    abilities: Abilities,
    efforts: Mapping[str, int | None] = EFFORTS,
) -> ThinkingPlan:
    """How to do it with this model. FieldError: it can't.

    Off is said by the template where it has a variable for it, and by a budget of 0 besides, so
    that a model that thinks in spite of it is closed. On is said by the template alone. An effort
    is its budget, and the template's own `reasoning_effort` where that is read.
    """
    level = asked.effort
    if level not in (None, OFF, *efforts):
        raise FieldError(EFFORT, f"must be one of {', '.join((OFF, *efforts))}, not {level!r:.100}")
    if asked.enable is False or level == OFF:
        return ThinkingPlan(0 if abilities.markers else None, _switched(abilities, False))
    wanted = "enable_thinking" if asked.enable else EFFORT if level is not None else None
    if wanted is not None and not abilities.markers:
        raise FieldError(wanted, "can't be served: this model has no thinking of its own")
    variables = _switched(abilities, True) if wanted is not None else {}
    if level is not None and EFFORT in abilities.variables:
        variables[EFFORT] = level
    budget = asked.budget if level is None else efforts[level]
    return ThinkingPlan(None if budget == -1 else budget, variables)


def _switched(abilities: Abilities, on: bool) -> dict[str, Any]:
    return {name: on for name in SWITCHES[:2] if name in abilities.variables}


def template_variables(body: Mapping[str, Any], abilities: Abilities) -> dict[str, Any]:
    """`chat_template_kwargs` less what is read here. FieldError: the template doesn't read it."""
    where = "chat_template_kwargs"
    given: dict[str, Any] = {}
    for outer, prefix in (
        (mapping(body.get("extra_body"), "extra_body"), "extra_body."),
        (body, ""),
    ):
        given |= mapping(outer.get(where), prefix + where)
    rest = {name: value for name, value in given.items() if name not in FLAT and value is not None}
    for name in rest:
        if name in _RESERVED:
            raise FieldError(f"{where}.{name}", "is the server's to set")
        if name not in abilities.variables:
            raise FieldError(f"{where}.{name}", "isn't read by the model's chat template")
    return rest


_RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents")
)


def parse_efforts(text: str) -> dict[str, int | None]:
    """The table with changes: "low=512,high=none". ValueError: it doesn't read so."""
    table = dict(EFFORTS)
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not name or name == OFF or not (value == OFF or value.isdecimal()):
            raise ValueError(
                f"{part!r} must be an effort and its tokens, as low=512, or as high=none for no "
                "budget"
            )
        table[name] = None if value == OFF else int(value)
    return table
