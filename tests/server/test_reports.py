"""Public bug reports of other servers, replayed: each names where it was reported.

After every case the server must be empty again (the fixture sees to it).
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from engine.prompt import Chat
from tests.scripted import tiny_spec
from tests.server.live import USER, Live, serving, strict
from tests.server.sockets import open_stream


def texts(live: Live, stream: bool, **fields: Any) -> dict[str, Any]:
    """A chat's answer, the same from either mode."""
    if not stream:
        (choice,) = live.chat(**fields).json()["choices"]
        message = choice["message"]
        return {
            "content": message["content"],
            "reasoning": message.get("reasoning", ""),
            "finish": choice["finish_reason"],
        }
    made: dict[str, Any] = {"content": "", "reasoning": "", "finish": None}
    for chunk in live.chunks(**fields):
        (choice,) = chunk["choices"]
        for name in ("content", "reasoning"):
            made[name] += choice["delta"].get(name, "")
        made["finish"] = choice["finish_reason"]
    return made


both = pytest.mark.parametrize("stream", [False, True])


@both
def test_vllm_3574_no_part_of_a_stop_string_leaks(live: Live, stream: bool) -> None:
    live.says("ABCDEFGHIJK")
    made = texts(live, stream, stop=["DEFGHIJ"])
    assert made == {"content": "ABC", "reasoning": "", "finish": "stop"}
    live.says("ABCDEFX")
    assert texts(live, stream, stop=["DEFGHIJ"])["content"] == "ABCDEFX"


@both
def test_vllm_38499_stop_strings_wait_for_the_answer(live: Live, stream: bool) -> None:
    live.says("<think>the four cases</think>Answer: four")
    made = texts(live, stream, stop=["four"])
    assert made == {"content": "Answer: ", "reasoning": "the four cases", "finish": "stop"}
    made = texts(live, stream, stop=["four"], stop_in_thinking=True)
    assert made == {"content": "", "reasoning": "the ", "finish": "stop"}


@both
def test_llamacpp_14937_a_character_cut_by_the_limit(live: Live, stream: bool) -> None:
    live.says("ok \N{GRINNING FACE}".encode())
    made = texts(live, stream, max_tokens=5)
    assert made == {"content": "ok \N{REPLACEMENT CHARACTER}", "reasoning": "", "finish": "length"}


@pytest.mark.parametrize("token", ["99999999", "-1", "x", "1.5", ""])
def test_vllm_16529_a_bias_for_no_token(live: Live, token: str) -> None:
    live.pace(0.002)
    answer: list[Any] = []
    beside = threading.Thread(
        target=lambda: answer.append(live.chat(temperature=0, max_tokens=60, ignore_eos=True))
    )
    beside.start()
    live.wait_running()
    response = live.chat(logit_bias={token: 5})
    beside.join()
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"
    assert answer[0].json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_vllm_7283_an_empty_prompt(live: Live, prompt: Any) -> None:
    response = live.complete(prompt=prompt)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert live.chat(messages=[]).status_code == 400
    assert live.complete().status_code == 200


def test_vllm_15041_one_id_twice(live: Live) -> None:
    live.pace(0.005)
    with open_stream(live, request_id="x", max_tokens=100, ignore_eos=True) as first:
        first.read_chunks(2)
        second = live.chat(request_id="x")
        assert second.status_code == 409
        assert second.json()["error"]["param"] == "request_id"
        assert first.read_all()[-1]["choices"][0]["finish_reason"] == "length"
    live.wait_idle()
    again = live.chat(request_id="x", max_tokens=1)
    assert again.status_code == 200
    assert again.json()["id"] == "chatcmpl-x"


def test_vllm_10234_every_logprob_is_finite(live: Live) -> None:
    live.says("a")
    chat = live.chat(logprobs=True, top_logprobs=5, top_k=1)
    banned = live.chat(logprobs=True, top_logprobs=20, allowed_token_ids=[5], max_tokens=2)
    echo = live.complete(echo=True, logprobs=5, top_k=1)
    for response in (chat, banned, echo):
        assert response.status_code == 200
        strict(response.text)


def test_vllm_35541_a_prompt_that_never_fits(folder: str) -> None:
    with serving(tiny_spec(folder, tokens=128)) as live:
        response = live.complete(prompt=[5] * 200)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert live.complete(prompt=[5] * 5).status_code == 200
        # what only outgrows the pool is served as far as it goes
        long = live.complete(prompt=[5] * 5, max_tokens=300, ignore_eos=True).json()
        assert long["choices"][0]["finish_reason"] == "length"


def test_vllm_30320_a_prompt_that_is_all_in_the_cache(live: Live) -> None:
    prompt = [7] * 64
    answers = [live.complete(prompt=prompt, temperature=0).json() for _ in range(3)]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert 0 < answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] < 64


def test_vllm_14326_every_choice_is_aborted(live: Live) -> None:
    live.pace(0.005)
    fields = {"n": 3, "ignore_eos": True, "max_tokens": 400}
    with open_stream(live, **fields) as stream:
        stream.read_chunks(3)
        live.wait_running(3)
    live.wait_idle(1)
    assert live.running() == 0
    assert live.metric("taut:request_success_total", finished_reason="abort") == 1


def test_vllm_11898_choices_differ_and_come_again(live: Live) -> None:
    fields = {"seed": 7, "temperature": 8.0, "max_tokens": 12, "ignore_eos": True}
    first, again = (live.chat(n=4, **fields).json()["choices"] for _ in range(2))
    assert first == again
    said = [choice["message"] for choice in first]
    assert len({str(message) for message in said}) == 4
    assert said[0] == live.chat(**fields).json()["choices"][0]["message"]


@both
def test_llamacpp_28182_a_budget_that_cuts(live: Live, stream: bool) -> None:
    """The script closes its thinking itself right after the forced closing."""
    live.says("<think>" + "x" * 60 + "</think></think>Done")
    made = texts(live, stream, thinking_token_budget=10, max_tokens=200)
    assert made["reasoning"].startswith("x" * 10)
    assert not made["reasoning"].startswith("x" * 11)
    assert "think>" not in made["content"] + made["reasoning"]
    usage = live.chat(thinking_token_budget=10, max_tokens=200).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 10


@both
def test_vllm_28852_a_template_that_opened_the_thinking(live: Live, stream: bool) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well <think>"}]
    fields = {
        "messages": messages,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    live.says("plan</think>42", Chat(messages=messages, continue_final_message=True))
    made = texts(live, stream, **fields)
    assert made == {"content": "42", "reasoning": "plan", "finish": "stop"}


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_apfel_100_usage_comes_only_when_asked(live: Live, options: Any) -> None:
    live.says("ab")
    chunks = live.chunks(stream_options=options)
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    asked = bool(options and options.get("include_usage"))
    assert len(usages) == asked
    assert bool(chunks[-1]["choices"]) != asked
    assert all(chunk["choices"] for chunk in chunks[:-1])


@both
def test_sglang_33154_an_end_inside_the_thinking(live: Live, stream: bool) -> None:
    live.says("<think>Hm")
    assert texts(live, stream) == {"content": "", "reasoning": "Hm", "finish": "stop"}


def test_vllm_13087_no_empty_deltas(live: Live) -> None:
    live.says("ABCABCABC")
    chunks = live.chunks(stop=["ABCD"])
    middle = [chunk["choices"][0]["delta"] for chunk in chunks[1:-1]]
    assert all(delta.get("content") for delta in middle)
    assert "".join(delta["content"] for delta in middle) == "ABCABCABC"


def test_llamafile_160_a_flag_as_a_string(live: Live) -> None:
    response = live.chat(stream="true")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream"


@pytest.mark.parametrize("where", ["chat_template_kwargs", "custom_params"])
def test_vllm_50166_a_budget_in_another_place(live: Live, where: str) -> None:
    live.says("<think>abcdefghijklmnop</think>q")
    usage = live.chat(**{where: {"thinking_budget": 10}}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 10
    response = live.chat(reasoning={"thinking_budget": 10})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "reasoning.thinking_budget"


def test_vllm_21089_an_empty_assistant_message(live: Live) -> None:
    messages = [*USER, {"role": "assistant", "content": ""}, *USER]
    assert live.chat(messages=messages, max_tokens=1).status_code == 200
