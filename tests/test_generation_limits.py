"""At the edges: empty prompts, full pools, wholly cached prompts, unknown ids, cut text."""

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import pytest

from engine import SamplingParams
from engine.request import LogitsRule, Mask, Sequence
from engine.scheduler.controller import Controller, Watch
from tests.conftest import MakeEngine
from tests.engines import Model, assert_greedy, greedy, prompts, run_all


@pytest.mark.parametrize("empty", ["", [], [[]], [""], [[1, 2], []]], ids=repr)
def test_an_empty_prompt_is_refused(empty: Any, make_engine: MakeEngine) -> None:
    """vllm-project/vllm#7283"""
    engine = make_engine()
    if empty == []:  # no prompts: no outputs
        assert engine.generate([]) == []
    else:
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.generate(empty, greedy(4))
    if isinstance(empty, str) or not empty:
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.add(empty)
        with pytest.raises(ValueError, match="prompt is empty"):
            next(engine.stream(empty))
    (output,) = engine.generate([[1, 2, 3]], greedy(4))
    assert len(output.token_ids) == 4


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, 304], "token id 304 at position 1.*0 to 303"),
        ([-1], "token id -1"),
        ([1, "a"], "item 1 is 'a'"),
        ([1, 2.0], "item 1 is 2.0"),
        ([True], "item 0 is True"),
        ([5] * 512, "512 tokens.*512"),
    ],
)
def test_a_bad_prompt_is_refused(prompt: Any, words: str, make_engine: MakeEngine) -> None:
    with pytest.raises(ValueError, match=words):
        make_engine().add(prompt)


def test_one_bad_prompt_refuses_all_before_any_starts(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="token id 9999"):
        engine.generate([[1, 2], [9999]])
    assert not engine.has_work()


def test_what_can_never_fit_is_refused_with_the_numbers(make_engine: MakeEngine) -> None:
    """Those before and behind it are answered (vllm-project/vllm#35541)."""
    engine = make_engine(kv_tokens=128)
    engine.add([1, 2, 3], greedy(8), id="before")
    with pytest.raises(ValueError, match=r"main: 200 prompt tokens .* 52 pages .* it has 32"):
        engine.add([7] * 200, greedy(8))
    with pytest.raises(ValueError, match="128 prompt tokens"):
        engine.add([7] * 128, greedy(8))  # the prompt fits, one token more doesn't
    engine.add([7] * 127, greedy(8), id="all")  # exactly the pool
    engine.add([4, 5], greedy(8), id="after")
    lengths = {id: len(o.token_ids) for id, o in run_all(engine).items()}
    assert lengths == {"before": 8, "all": 2, "after": 8}


def test_outgrowing_the_last_page_ends_with_length(
    tiny_model: Model, make_engine: MakeEngine
) -> None:
    """128 cells hold the prompt and all but the last token; its text is kept, others go on
    (vllm-project/vllm#35541)."""
    engine = make_engine(kv_tokens=128)
    engine.add([7] * 50, greedy(400), id="long")
    engine.add([4, 5], greedy(100), id="short")
    outputs = run_all(engine)
    assert len(outputs["long"].token_ids) == 128 - 50 + 1
    assert outputs["long"].finish_reason == "length"
    assert outputs["long"].text
    assert len(outputs["short"].token_ids) == 100
    for output in outputs.values():
        assert_greedy(tiny_model, output)
    (next_one,) = engine.generate([[1, 2]], greedy(8))
    assert len(next_one.token_ids) == 8


@pytest.mark.parametrize("size", [16, 32, 80])
def test_a_wholly_cached_prompt(size: int, tiny_model: Model, make_engine: MakeEngine) -> None:
    """Length k * 16, again and three times at once: the last token at least runs
    (vllm-project/vllm#30320)."""
    engine = make_engine()
    prompt = prompts(8, seed=12)[7][:size]
    (first,) = engine.generate([prompt], greedy(20))
    assert first.cached_tokens == 0
    assert_greedy(tiny_model, first)
    (second,) = engine.generate([prompt], greedy(20))
    three = engine.generate([prompt] * 3, greedy(20))
    for output in (second, *three):
        assert output.token_ids == first.token_ids
        assert output.cached_tokens == size - 16


def test_the_same_prompt_at_once_and_never_seen(make_engine: MakeEngine) -> None:
    """All of them insert the same pages; each page is kept once."""
    engine = make_engine(max_batched_tokens=24, max_num_seqs=8)
    prompt = prompts(8, seed=13)[7][:64]
    outputs = engine.generate([prompt] * 5, greedy(12))
    assert len({o.token_ids for o in outputs}) == 1
    assert engine.stats().kv["main"].prefix_pages == 2 * 2 * 4


def test_prefix_pages_give_way(tiny_model: Model, make_engine: MakeEngine) -> None:
    """A pool full of kept pages serves a new prompt that needs all of it."""
    engine = make_engine(kv_tokens=128)
    for prompt in prompts(8, seed=14)[5:]:
        engine.generate([prompt], greedy(4))
    (output,) = engine.generate([[9] * 120], greedy(6))
    assert_greedy(tiny_model, output)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {304: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", [3, 304]),
        ("stop_token_ids", [1000]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(
    field: str, value: Any, make_engine: MakeEngine
) -> None:
    """vllm-project/vllm#16529"""
    engine = make_engine()
    bad = SamplingParams(max_tokens=4, **{field: value})
    with pytest.raises(ValueError, match=rf"{field} .*0 to 303"):
        engine.add([1, 2], bad)
    with pytest.raises(ValueError, match=field):
        engine.generate([[1, 2], [3]], [SamplingParams(), bad])
    assert not engine.has_work()


def test_one_token_left_has_finite_logprobs(make_engine: MakeEngine) -> None:
    """vllm-project/vllm#10234"""
    engine = make_engine()
    for params in (
        SamplingParams(max_tokens=6, top_k=1, logprobs=5, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=6, allowed_token_ids=[7], logprobs=20, ignore_eos=True),
        SamplingParams(max_tokens=6, logit_bias={7: 100.0}, top_p=0.01, logprobs=0),
        SamplingParams(max_tokens=6, temperature=0.0, logprobs=5, ignore_eos=True),
    ):
        (output,) = engine.generate([[1, 2, 3]], params)
        logprobs = output.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == 6
        for said in logprobs:
            assert math.isfinite(said.logprob)
            assert all(math.isfinite(value) for _, value in said.top)


@dataclass(frozen=True)
class Say(Controller):
    """The model says these tokens, then whatever it likes."""

    script: tuple[int, ...]

    def watch(self) -> Watch:
        return _SayWatch(self.script)


class _SayWatch(Watch):
    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script

    def rules(self, seq: Sequence) -> tuple[LogitsRule, ...]:
        return (_SayRule(self._script, seq.prompt_len),)


@dataclass(frozen=True)
class _SayRule:
    script: tuple[int, ...]
    prompt_len: int

    def mask(self, tokens: Seq[int]) -> Mask | None:
        allow = self.script[len(tokens) - self.prompt_len :][:1]
        return Mask(allow=allow) if allow else None

    def fork(self) -> LogitsRule:
        return self

    def rewind(self, pos: int) -> None:
        pass


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (3, "ok "),
        (4, "ok \ufffd"),
        (5, "ok \ufffd"),
        (6, "ok \ufffd"),
        (7, "ok \U0001f600"),
        (8, "ok \U0001f600\ufffd"),
        (9, "ok \U0001f600\u00e9"),
    ],
)
def test_max_tokens_inside_a_character(
    count: int, text: str, tiny_model: Model, make_engine: MakeEngine
) -> None:
    """One U+FFFD stands for the bytes of half a character, streamed and whole
    (ggml-org/llama.cpp#14937)."""
    script = make_engine().tokenizer.encode("ok \U0001f600\u00e9")
    assert len(script) == 9  # every byte is a token
    engine = make_engine(controllers=(Say(tuple(script)),))
    (whole,) = engine.generate([[1, 2]], greedy(count))
    deltas = list(engine.stream([1, 2], greedy(count)))
    assert whole.token_ids == tuple(script[:count])
    assert whole.text == "".join(d.text for d in deltas) == text
    assert whole.finish_reason == deltas[-1].finish_reason == "length"
    assert all("\ufffd" not in d.text for d in deltas[:-1])
