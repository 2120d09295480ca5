"""Thinking and answer texts and counts, exactly, through the whole engine with a scripted model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from sentencepiece import SentencePieceTrainer

from engine.assembler import Request
from engine.config import ReasoningSpec
from engine.engine import Engine
from engine.model.tokenizer import Tokenizer, tokenizer_from_folder
from engine.output import Choice, Output
from engine.request import Finish, SamplingParams, Sequence
from engine.scheduler.controller import Controller
from engine.scheduler.controllers.loop_guard import LoopGuard
from engine.scheduler.reasoning import Markers
from engine.scheduler.scheduler import Settled
from tests.scripted import letters, saying, script_engine, tiny_folder, tiny_spec

PLAIN = ReasoningSpec()
WORDS = ReasoningSpec(start="[[think]]", end="[[done]]", closing="Enough.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@dataclass
class Talk:
    """An engine whose model says what is asked, and what came of it."""

    engine: Engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def ids(self, *parts: str | bytes) -> list[int]:
        """Markers and end tokens named whole, other text one token a byte."""
        found: list[int] = []
        for part in parts:
            whole = self.tokenizer.token_id(part) if isinstance(part, str) and len(part) > 1 else 0
            marked = isinstance(part, str) and part.startswith(("<", "[["))
            if marked and isinstance(part, str):
                found += [whole] if whole else self.tokenizer.encode(part, add_special=False)
            else:
                found += letters(self.tokenizer, part)
        return found

    def says(self, prompt: str, *parts: str | bytes, **params: object) -> Choice:
        """The model's answer; the deltas, put together, are the same."""
        tokens = self.tokenizer.encode(prompt)
        end = self.ids("<|im_end|>")[0]
        script_engine(self.engine, saying(len(tokens), self.ids(*parts), end))
        asked = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
        deltas = list(self.engine.stream(prompt, asked))
        output = deltas[-1].output
        assert output is not None
        choice = output.choices[0]
        assert "".join(d.text for d in deltas) == choice.text
        assert "".join(d.thinking for d in deltas) == choice.thinking
        assert tuple(t for d in deltas for t in d.token_ids) == choice.token_ids
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        self.engine.check()
        return choice


Speak = Callable[..., Talk]


@pytest.fixture
def speak(folder: str) -> Iterator[Speak]:
    made: list[Engine] = []

    def make(
        reasoning: ReasoningSpec | None = None, controllers: tuple[Controller, ...] = ()
    ) -> Talk:
        made.append(Engine(tiny_spec(folder, reasoning=reasoning, controllers=controllers)))
        return Talk(made[-1])

    yield make
    for engine in made:
        assert engine.stats().kv["main"].used_pages == 0
        engine.close()


def counts(choice: Choice) -> tuple[int, int]:
    return choice.thinking_tokens, choice.answer_tokens


def test_thinking_and_answer(speak: Speak) -> None:
    choice = speak().says("Hi", "<think>", "plan", "</think>", "42")
    assert (choice.thinking, choice.text) == ("plan", "42")
    assert counts(choice) == (4, 3)  # the end token is the answer's
    assert choice.finish_reason == "stop"


def test_the_template_has_opened_it(speak: Speak) -> None:
    """vllm-project/vllm#28852"""
    choice = speak().says("Hi<think>\n", "plan", "</think>", "42")
    assert (choice.thinking, choice.text) == ("plan", "42")
    assert counts(choice) == (4, 3)


def test_a_closed_block_in_the_prompt_opens_nothing(speak: Speak) -> None:
    choice = speak().says("Hi<think>\n\n</think>\n\n", "42")
    assert (choice.thinking, choice.text) == ("", "42")
    assert counts(choice) == (0, 3)


def test_no_tag_is_text_wherever_it_stands(speak: Speak) -> None:
    choice = speak().says("Hi<think>\n", "<think>", "a", "</think>", "</think>", "b", "</think>")
    assert (choice.thinking, choice.text) == ("a", "b")


def test_a_budget_closes_the_thinking(speak: Speak) -> None:
    talk = speak()
    closing = talk.tokenizer.decode(talk.engine.markers.closing[:-1])
    forced = len(talk.engine.markers.closing)
    # the script goes by position: what it would have said meanwhile is overruled
    parts = ("x" * 10, "?" * forced, "42")
    choice = talk.says("Hi<think>\n", *parts, thinking_token_budget=10)
    assert (choice.thinking, choice.text) == ("x" * 10 + closing, "42")
    assert counts(choice) == (10, 3)
    assert closing.strip()


def test_a_model_that_closes_after_the_budget_did(speak: Speak) -> None:
    """ggml-org/llama.cpp#28182"""
    talk = speak()
    forced = len(talk.engine.markers.closing)
    parts = ("x" * 10, "?" * forced, "</think>", "42")
    choice = talk.says("Hi<think>\n", *parts, thinking_token_budget=10)
    assert choice.text == "42"
    assert "think>" not in choice.thinking
    assert counts(choice) == (10, 3)


def test_what_a_user_quotes_opens_nothing(speak: Speak) -> None:
    """Nor does a block that an earlier turn left open."""
    turn = "<|im_start|>user\nWhat does <think> do?<|im_end|>\n<|im_start|>assistant\n"
    choice = speak().says(turn, "It opens.", max_tokens=30)
    assert (choice.thinking, choice.text) == ("", "It opens.")
    choice = speak().says(turn + "<think>\n", "hm", "</think>", "It opens.", max_tokens=30)
    assert (choice.thinking, choice.text) == ("hm", "It opens.")


def test_a_budget_at_every_turn(speak: Speak) -> None:
    """The thinking of earlier turns, in the prompt, counts for nothing."""
    talk = speak()
    closing = talk.engine.tokenizer.decode(talk.engine.markers.closing[:-1])
    for turns in range(4):
        past = "<|im_start|>assistant\n<think>" + "a" * 9 + "</think>b<|im_end|>\n"
        prompt = past * turns + "<|im_start|>assistant\n<think>\n"
        choice = talk.says(prompt, "a" * 80, max_tokens=70, thinking_token_budget=5)
        assert choice.thinking == "aaaaa" + closing
        assert choice.thinking_tokens == 5
        assert choice.edits == {"ThinkingBudget": 1}


def test_a_loop_closes_the_thinking_and_is_told(speak: Speak) -> None:
    talk = speak(controllers=(LoopGuard(),))
    closing = talk.engine.tokenizer.decode(talk.engine.markers.closing[:-1])
    choice = talk.says("x", "<think>", "ab" * 100, max_tokens=150)
    assert choice.thinking == ("ab" * 32)[:63] + closing
    assert choice.edits == {"LoopGuard": 1}
    assert choice.thinking_tokens == 63
    assert talk.engine.stats().scheduler.edits["LoopGuard"] == 1


def test_a_budget_that_is_not_reached(speak: Speak) -> None:
    choice = speak().says("Hi<think>\n", "plan", "</think>", "42", thinking_token_budget=5)
    assert (choice.thinking, choice.text, choice.thinking_tokens) == ("plan", "42", 4)


def test_a_budget_of_nothing(speak: Speak) -> None:
    talk = speak()
    closing = talk.tokenizer.decode(talk.engine.markers.closing[:-1])
    parts = ("?" * len(talk.engine.markers.closing), "42")
    choice = talk.says("Hi<think>\n", *parts, thinking_token_budget=0)
    assert (choice.thinking, choice.text) == (closing, "42")
    assert counts(choice) == (0, 3)


def test_two_blocks(speak: Speak) -> None:
    parts = ("<think>", "one", "</think>", "a", "<think>", "two", "</think>", "b")
    choice = speak().says("Hi", *parts)
    assert (choice.thinking, choice.text) == ("onetwo", "ab")
    assert counts(choice) == (6, 3)


def test_markers_of_several_tokens(speak: Speak) -> None:
    talk = speak(WORDS)
    assert min(len(talk.engine.markers.start), len(talk.engine.markers.end)) > 1
    choice = talk.says("Hi", "[[think]]", "plan [[x", "[[done]]", "4[[2", "[[done]]", "!")
    assert (choice.thinking, choice.text) == ("plan [[x", "4[[2!")
    assert counts(choice) == (8, 6)


def test_half_a_marker_is_text_at_the_end(speak: Speak) -> None:
    talk = speak(WORDS)
    half = talk.ids("[[done]]")[:-1]
    choice = talk.says("Hi[[think]]", "a", talk.tokenizer.decode(half).encode(), max_tokens=9)
    assert choice.thinking == "a" + talk.tokenizer.decode(half)
    assert choice.text == ""


def test_a_budget_with_markers_of_several_tokens(speak: Speak) -> None:
    talk = speak(WORDS)
    parts = ("x" * 6, "?" * len(talk.engine.markers.closing), "ok")
    choice = talk.says("Hi[[think]]", *parts, thinking_token_budget=6)
    assert (choice.thinking, choice.text) == ("xxxxxxEnough.", "ok")
    assert counts(choice) == (6, 3)


def test_without_markers_the_chain_ends_at_the_last_answer_marker(speak: Speak) -> None:
    text = "So \\boxed{1}? No, \\boxed{2}."
    choice = speak(PLAIN).says("Hi", text)
    assert (choice.thinking, choice.text) == ("", text)
    chain = text.rindex("\\boxed{")
    assert counts(choice) == (chain, len(text) + 1 - chain)


def test_without_markers_a_budget_forces_the_closing_phrase_once(speak: Speak) -> None:
    talk = speak(PLAIN)
    closing = talk.tokenizer.decode(talk.engine.markers.closing)
    parts = ("x" * 10, "?" * len(talk.engine.markers.closing), "42}. More and more.")
    choice = talk.says("Hi", *parts, thinking_token_budget=10)
    assert choice.text == "x" * 10 + closing + "42}. More and more."
    assert choice.thinking_tokens == 10


def test_cut_inside_the_thinking(speak: Speak) -> None:
    choice = speak().says("Hi<think>\n", "a long plan", max_tokens=6)
    assert (choice.thinking, choice.text) == ("a long", "")
    assert (*counts(choice), choice.finish_reason) == (6, 0, "length")


def test_characters_of_several_tokens(speak: Speak) -> None:
    choice = speak().says("Hi<think>\n", "数é🎈", "</think>", "四🎈")
    assert (choice.thinking, choice.text) == ("数é🎈", "四🎈")


def test_a_character_never_goes_on_behind_a_marker(speak: Speak) -> None:
    half, rest = "€".encode()[:2], "€".encode()[2:]
    choice = speak().says("Hi<think>\n", half, "</think>", rest, "<think>", rest, "</think>", "a")
    assert (choice.thinking, choice.text) == ("\ufffd\ufffd", "\ufffda")


def test_ends_of_sequence_are_ignored_where_asked(speak: Speak) -> None:
    """Each of the model's several ids."""
    talk = speak()
    ends = talk.engine.models["main"].checkpoint.generation.eos_ids
    assert len(ends) == 2
    for end in ends:
        name = talk.tokenizer.decode([end], skip_special=False)
        choice = talk.says("Hi", "a", name, "b", max_tokens=6)
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("a", "stop", end)
        choice = talk.says("Hi", "a", name, "b", max_tokens=6, ignore_eos=True)
        assert (choice.text, len(choice.token_ids), choice.finish_reason) == ("ab", 6, "length")


def test_stop_strings_sleep_while_thinking(speak: Speak) -> None:
    """vllm-project/vllm#38499"""
    parts = ("a stop b", "</think>", "c stop d")
    choice = speak().says("Hi<think>\n", *parts, stop=["stop"])
    assert (choice.thinking, choice.text) == ("a stop b", "c ")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "stop")


def test_stop_strings_in_the_thinking(speak: Speak) -> None:
    parts = ("a stop b", "</think>", "c")
    choice = speak().says("Hi<think>\n", *parts, stop=["stop"], stop_in_thinking=True)
    assert (choice.thinking, choice.text) == ("a ", "")


def test_no_part_of_a_stop_string_leaks(speak: Speak) -> None:
    """vllm-project/vllm#3574"""
    talk = speak()
    assert talk.says("Hi", "ABCDEFGHIJK", stop=["DEFGHIJ"]).text == "ABC"
    assert talk.says("Hi", "ABCDEFX", stop=["DEFGHIJ"]).text == "ABCDEFX"
    assert talk.says("Hi", "ABCDEF", stop=["DEFGHIJ"], max_tokens=6).text == "ABCDEF"


def test_a_stop_string_stays_where_asked(speak: Speak) -> None:
    choice = speak().says("Hi", "ABCDEFG", stop=["CD"], include_stop_str_in_output=True)
    assert (choice.text, choice.stop_reason) == ("ABCD", "CD")


@pytest.mark.parametrize(("include", "text"), [(False, "a f"), (True, "a fo")])
def test_a_stop_string_inside_a_token(speak: Speak, include: bool, text: str) -> None:
    talk = speak()
    whole = talk.tokenizer.token_id("fox")
    assert whole is not None
    tokens = [*talk.ids("a "), whole, *talk.ids("b")]
    prompt = talk.tokenizer.encode("Hi")
    script_engine(talk.engine, saying(len(prompt), tokens, whole))
    asked = SamplingParams(temperature=0.0, stop="o", include_stop_str_in_output=include)
    assert talk.engine.generate("Hi", asked)[0].text == text


def test_a_special_token_inside_a_stop_string(speak: Speak) -> None:
    parts = ("xa", "<|im_start|>", "by")
    choice = speak().says("Hi", *parts, stop=["ab"], skip_special_tokens=False)
    assert choice.text == "x"


def test_special_tokens_are_shown_where_asked(speak: Speak) -> None:
    talk = speak()
    parts = ("a", "<|im_start|>", "b")
    assert talk.says("Hi", *parts).text == "ab"
    assert talk.says("Hi", *parts, skip_special_tokens=False).text == "a<|im_start|>b"


# a vocabulary that writes spaces in front of words


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["the dog thinks the dog is the dog", "42 dogs think"] * 20),
        model_writer=out,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("spm")
    (path / "tokenizer.model").write_bytes(out.getvalue())
    return tokenizer_from_folder(path)


def told(tokenizer: Tokenizer, words: list[str], *, chat: bool, markers: Markers) -> Output:
    """What an output of these tokens reads, one settled at a time."""
    said = [tokenizer.encode(word, add_special=False)[0] for word in words]
    messages = [{"role": "user", "content": "Hi"}] if chat else None
    seq = Sequence("a", 1, [1], SamplingParams(), messages=messages)
    request = Request([seq], tokenizer, markers)
    deltas = []
    for at, token in enumerate(said, 1):
        seq.tokens.append(token)
        finish = Finish("length") if at == len(said) else None
        deltas.append(request.push(Settled(seq, at, at + 1, finish)))
    output = deltas[-1].output
    assert output is not None
    assert "".join(d.text for d in deltas) == output.text
    assert "".join(d.thinking for d in deltas) == output.thinking
    return output


def test_a_continuation_keeps_its_leading_space(spm: Tokenizer) -> None:
    assert told(spm, ["the", "dog"], chat=False, markers=Markers()).text == " the dog"


def test_an_answer_to_messages_begins_without_one(spm: Tokenizer) -> None:
    assert told(spm, ["the", "dog"], chat=True, markers=Markers()).text == "the dog"


def test_only_the_output_s_beginning_loses_its_space(spm: Tokenizer) -> None:
    (end,) = spm.encode("42", add_special=False)[:1]
    markers = Markers(end=(end,), closing=(end,), opened=True)
    output = told(spm, ["the", "42", "dog"], chat=True, markers=markers)
    assert (output.choices[0].thinking, output.text) == ("the", " dog")
