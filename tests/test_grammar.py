"""Answers of a given form, through the whole engine: every sampled one parses and validates."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import pytest

from engine import Engine, ReasoningSpec, SamplingParams
from engine.output import Choice
from engine.request import Grammar, GrammarError
from engine.scheduler.controllers.loop_guard import LoopGuard
from tests.engines import assert_idle
from tests.scripted import letters, saying, script_engine, tiny_folder, tiny_spec

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "boolean"},
    {"enum": ["one", 2, None, {"three": [3]}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
    {"type": "string", "format": "date"},
    {"oneOf": [{"const": "x"}, {"type": "null"}]},
    {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"enum": [1, 2]}},
                           "required": ["v"], "additionalProperties": False}},
        "anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "array", "items": {"$ref": "#/$defs/leaf"},
                                             "maxItems": 2}],
    },
]  # fmt: skip
WORDS = ReasoningSpec(start="[[think]]", end="[[done]]", closing="Enough.")


def of_schema(schema: object) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


def check_answer(choice: Choice, schema: dict[str, Any]) -> None:
    assert choice.finish_reason == "stop", choice
    value = json.loads(choice.text)
    assert jsonschema_rs.is_valid(schema, value), choice.text
    assert choice.text in (json.dumps(value), json.dumps(value, ensure_ascii=False)) or (
        "\\" in choice.text  # other escapes of the same characters
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@dataclass
class Rig:
    """An engine, and a way to script its model."""

    engine: Engine

    def ids(self, *parts: str) -> list[int]:
        """Markers whole, other text one token a byte."""
        found: list[int] = []
        for part in parts:
            token = self.engine.tokenizer.token_id(part) if part.startswith("<") else None
            found += letters(self.engine.tokenizer, part) if token is None else [token]
        return found

    def says(self, prompt: str, *parts: str, **params: Any) -> Choice:
        """What comes of a model that would say this, and then <|im_end|> for ever."""
        tokens = self.engine.tokenizer.encode(prompt)
        script_engine(self.engine, saying(len(tokens), self.ids(*parts), self.ids("<|im_end|>")[0]))
        (output,) = self.engine.generate(prompt, SamplingParams(temperature=0.0, **params))
        assert_idle(self.engine)
        return output.choices[0]


Make = Callable[..., Rig]


@pytest.fixture
def make(folder: str) -> Iterator[Make]:
    made: list[Engine] = []

    def rig(**spec: Any) -> Rig:
        made.append(Engine(tiny_spec(folder, **spec)))
        return Rig(made[-1])

    yield rig
    for engine in made:
        engine.close()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:30])
def test_every_sampled_answer_validates(make: Make, schema: dict[str, Any]) -> None:
    """Random weights: a model that would write anything at all."""
    engine = make(reasoning=ReasoningSpec()).engine
    params = SamplingParams(
        n=12, seed=3, temperature=1.5, max_tokens=300, grammar=of_schema(schema)
    )
    outputs = engine.generate(["Hi", "What?"], params)
    for output in outputs:
        for choice in output.choices:
            check_answer(choice, schema)
    assert len({choice.token_ids for output in outputs for choice in output.choices}) > 1
    again = engine.generate(["Hi", "What?"], params)
    assert [output.choices for output in again] == [output.choices for output in outputs]
    assert_idle(engine)


def test_free_requests_beside_it_are_untouched(make: Make) -> None:
    engine = make(reasoning=ReasoningSpec()).engine
    free = SamplingParams(seed=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    alone = engine.generate("Hi", free)[0].token_ids
    bound = SamplingParams(seed=5, temperature=1.0, grammar=of_schema(PERSON))
    outputs = engine.generate(["Hi", "Hi", "Hi"], [bound, free, bound])
    assert outputs[1].token_ids == alone
    assert outputs[0].token_ids == outputs[2].token_ids


# thinking


def test_only_the_answer_is_bound(make: Make) -> None:
    parts = ("<think>", 'Not {"json"!', "</think>", "No.")
    choice = make().says("Hi", *parts, grammar=of_schema({"type": "boolean"}))
    assert choice.thinking == 'Not {"json"!'
    assert choice.text in ("true", "false")
    assert choice.finish_reason == "stop"


def test_the_prompt_has_opened_the_thinking(make: Make) -> None:
    rig = make()
    choice = rig.says("Hi<think>", "ab", "</think>", "true", grammar=of_schema({"type": "boolean"}))
    assert (choice.thinking, choice.text) == ("ab", "true")


def test_thinking_that_is_over_in_the_prompt_is_not_opened_again(make: Make) -> None:
    rig = make()
    for prompt, thinks in (("<think></think>", False), ("<think></think><|im_end|>", True)):
        choice = rig.says(prompt, "<think>", "a", "</think>", grammar=of_schema({"const": 1}))
        assert choice.thinking == ("a" if thinks else "")
        assert choice.text == "1"


def test_a_budget_closes_the_thinking_and_the_form_begins(make: Make) -> None:
    rig = make()
    grammar = of_schema({"type": "array", "items": {"enum": [1]}, "maxItems": 2})
    for budget in (0, 3):
        choice = rig.says("Hi", "<think>", "a" * 80, grammar=grammar, thinking_token_budget=budget)
        assert choice.thinking_tokens == budget
        assert json.loads(choice.text) in ([], [1], [1, 1])


def test_a_looping_chain_is_closed_and_the_form_begins(make: Make) -> None:
    choice = make(controllers=(LoopGuard(),)).says(
        "Hi", "<think>", "ab" * 100, grammar=of_schema({"const": "x"}), max_tokens=200
    )
    assert choice.edits == {"LoopGuard": 1}
    assert choice.text == '"x"'


def test_no_marker_stands_in_a_string(make: Make) -> None:
    """As text it would be legal JSON, but what follows would become thinking."""
    for marker in ("<think>", "</think>"):
        choice = make().says("Hi", '"a', marker, 'b"', grammar=of_schema({"type": "string"}))
        assert choice.thinking == ""
        assert isinstance(json.loads(choice.text), str)
        assert not set(make().ids(marker)) & set(choice.token_ids)


def test_markers_of_several_tokens(make: Make) -> None:
    rig = make(reasoning=WORDS)
    pieces = rig.engine.tokenizer.encode("[[think]]", add_special=False)
    assert len(pieces) > 1
    end = rig.engine.tokenizer.encode("[[done]]", add_special=False)
    object_only = of_schema({"type": "object", "properties": {}, "additionalProperties": False})
    script = [*pieces, *rig.ids("hm"), *end, *rig.ids("{}")]

    def run(grammar: Grammar) -> Choice:
        prompt = rig.engine.tokenizer.encode("Hi")
        script_engine(rig.engine, saying(len(prompt), script, rig.ids("<|im_end|>")[0]))
        params = SamplingParams(temperature=0.0, grammar=grammar)
        return rig.engine.generate("Hi", params)[0].choices[0]

    choice = run(object_only)
    assert (choice.thinking, choice.text) == ("hm", "{}")
    # where the form may begin like the marker, it is the form
    array = {"type": "array", "items": {"type": "array", "maxItems": 0}, "maxItems": 1}
    choice = run(of_schema(array))
    assert choice.thinking == ""
    assert json.loads(choice.text) in ([], [[]])


# ends


def test_a_form_that_may_go_on_ends_where_the_model_ends_it(make: Make) -> None:
    choice = make().says("Hi", "12", grammar=of_schema({"type": "integer"}))
    assert (choice.text, choice.finish_reason) == ("12", "stop")


def test_a_form_that_is_complete_ends_without_an_end_token(make: Make) -> None:
    rig = make()
    choice = rig.says("Hi", "true!", grammar=of_schema({"type": "boolean"}), min_tokens=30)
    assert choice.token_ids == tuple(rig.ids("true"))
    assert choice.finish_reason == "stop"
    assert choice.stop_reason is None
    choice = rig.says("Hi", "true!", grammar=of_schema({"type": "boolean"}), ignore_eos=True)
    assert choice.text == "true"


def test_a_cut_answer_is_the_beginning_of_one(make: Make) -> None:
    choice = make().says("Hi", '{"name": "x', grammar=of_schema(PERSON), max_tokens=11)
    assert (choice.text, choice.finish_reason) == ('{"name": "x', "length")


# refusals


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "EOF while parsing"),
        (Grammar("json_schema", "[]"), "Expecting object schema"),
        (of_schema({"type": "foo"}), "Invalid type"),
        (of_schema({"type": "string", "pattern": "("}), "regex parse error"),
        (of_schema({"type": "array", "uniqueItems": True}), "Unimplemented keys"),
        (of_schema({"uniqueItems": True, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (of_schema({"$ref": "http://example.com/schema"}), "not present in a registry"),
        (of_schema({"$ref": "file:///etc/passwd"}), "not present in a registry"),
        (of_schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable"),
        (Grammar("lark", "begin: A"), "start"),
        (Grammar("json_schema", " " * 200_000), "longer than"),
        (Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion limit"),
        (of_schema({"const": "\ud800"}), "hex escape"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_grammars_are_refused_before_they_start(
    make: Make, grammar: Grammar, words: str
) -> None:
    rig = make()
    with pytest.raises(GrammarError, match=f"^grammar: .*{words}"):
        rig.engine.add("Hi", SamplingParams(grammar=grammar))
    assert_idle(rig.engine)
    assert rig.says("Hi", "true", grammar=of_schema({"type": "boolean"})).text == "true"


def test_a_long_chain_of_references_does_not_break_the_process(make: Make) -> None:
    count = 3500
    defs: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(count)}
    schema = {"$defs": {**defs, str(count): {"type": "null"}}, "$ref": "#/$defs/0"}
    assert make().says("Hi", "null", grammar=of_schema(schema)).text == "null"


def test_many_compile_at_once(make: Make) -> None:
    """The deep stacks that they get are theirs alone."""
    grammars, before = make().engine.grammars, threading.stack_size()
    with ThreadPoolExecutor(8) as pool:
        matchers = list(pool.map(grammars.matcher, [of_schema({"const": i}) for i in range(40)]))
    assert threading.stack_size() == before
    assert len({matcher.mask() for matcher in matchers}) == 10, "by their first digits"


def test_a_budget_that_would_break_the_form_is_refused(make: Make) -> None:
    engine = make(reasoning=ReasoningSpec()).engine
    with pytest.raises(
        ValueError, match="thinking_token_budget: this model has no thinking markers"
    ):
        engine.add("Hi", SamplingParams(grammar=of_schema(PERSON), thinking_token_budget=5))


def test_params_are_checked() -> None:
    with pytest.raises(ValueError, match="grammar must be a Grammar"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grammar\.kind"):
        Grammar("regex", "a")  # type: ignore[arg-type]
