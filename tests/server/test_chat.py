"""/v1/chat/completions, whole and streamed, as openai-python and a socket see it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.live import NAME, USER, Live

THOUGHT = "<think>Let me see.</think>It is 4."


def test_an_answer_has_the_shape_that_clients_read(live: Live) -> None:
    live.says("Hello")
    response = live.chat(max_tokens=9)
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"]
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert type(body["created"]) is int
    assert body["model"] == NAME
    (choice,) = body["choices"]
    assert choice["index"] == 0
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "stop"
    prompt = len(live.tokens(USER))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_openai_python(live: Live) -> None:
    live.says(THOUGHT)
    with live.client() as client:
        completion = client.chat.completions.create(model=NAME, messages=USER)
    message = completion.choices[0].message
    assert message.content == "It is 4."
    assert message.reasoning_content == "Let me see."
    assert message.reasoning == "Let me see."
    assert completion.usage is not None
    details = completion.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == len("Let me see.")
    assert completion._request_id


def test_openai_python_streams(live: Live) -> None:
    live.says(THOUGHT)
    with live.client() as client:
        chunks = list(
            client.chat.completions.create(
                model=NAME,
                messages=USER,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "It is 4."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "Let me see."
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


def test_the_order_of_chunks(live: Live) -> None:
    live.says(THOUGHT)
    chunks = live.chunks()
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    first, *middle, last = (chunk["choices"][0] for chunk in chunks)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert last["delta"] == {}
    assert last["finish_reason"] == "stop"
    for choice in middle:
        assert choice["finish_reason"] is None
        keys = set(choice["delta"])
        assert keys in ({"content"}, {"reasoning_content", "reasoning"})
        assert all(choice["delta"].values())
    kinds = ["content" in choice["delta"] for choice in middle]
    assert kinds == sorted(kinds)
    assert all("usage" not in chunk for chunk in chunks)


def test_headers_of_a_stream(live: Live) -> None:
    live.says("Hi")
    response = live.chat(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("fields", [{}, {"n": 3, "seed": 5, "temperature": 8.0}])
def test_both_modes_agree(live: Live, fields: dict[str, Any]) -> None:
    asked = {
        "max_tokens": 24,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **fields,
    }
    whole = live.chat(**asked).json()
    chunks = live.chunks(**asked, stream_options={"include_usage": True})
    count = asked.get("n", 1)
    joined: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "logprobs": [], "token_ids": []} for _ in range(count)
    ]
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        into = joined[choice["index"]]
        for name in ("content", "reasoning"):
            into[name] += choice["delta"].get(name, "")
        into["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        into["token_ids"] += choice.get("token_ids", [])
        if choice["finish_reason"]:
            into["finish"] = choice["finish_reason"]
    for made, choice in zip(joined, whole["choices"], strict=True):
        assert made["content"] == choice["message"]["content"]
        assert made["reasoning"] == choice["message"].get("reasoning", "")
        assert made["logprobs"] == choice["logprobs"]["content"]
        assert made["token_ids"] == choice["token_ids"]
        assert made["finish"] == choice["finish_reason"]
    assert chunks[-1]["choices"] == []
    first, again = whole["usage"], chunks[-1]["usage"]
    assert first["completion_tokens"] == again["completion_tokens"]
    assert first["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert first["prompt_tokens"] == len(whole["prompt_token_ids"])


def test_logprobs_of_a_chat(live: Live) -> None:
    live.says("é!")
    (choice,) = live.chat(logprobs=True, top_logprobs=3, max_tokens=3).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [ord("!")]]
    assert content[2]["token"] == "!"
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in content)


def test_cached_tokens_are_told(live: Live) -> None:
    messages = [{"role": "user", "content": "a word " * 20}]
    first = live.chat(messages=messages, max_tokens=2).json()["usage"]
    again = live.chat(messages=messages, max_tokens=2).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < again["prompt_tokens_details"]["cached_tokens"] < again["prompt_tokens"]


@pytest.mark.parametrize(
    ("message", "same"),
    [
        ({"role": "developer", "content": "Be kind"}, {"role": "system", "content": "Be kind"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "user", "content": "Hi"},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "4", "reasoning": "2+2"},
            {"role": "assistant", "content": "4"},
        ),
        ({"role": "user", "content": "x", "name": None}, {"role": "user", "content": "x"}),
    ],
)
def test_forms_of_messages(live: Live, message: dict[str, Any], same: dict[str, str]) -> None:
    body = live.chat(messages=[message, *USER], max_tokens=1, return_token_ids=True).json()
    assert body["prompt_token_ids"] == live.tokens([same, *USER])


def test_nulls_are_defaults_and_unknown_fields_are_ignored(live: Live) -> None:
    live.says("ok")
    nulls = ["temperature", "top_p", "n", "stop", "max_tokens", "stream", "stream_options"]
    nulls += ["seed", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice", "user"]
    nulls += ["response_format", "reasoning_effort", "thinking_token_budget", "presence_penalty"]
    unknown = {"metadata": {"a": 1}, "store": True, "service_tier": "auto", "made_up": [1]}
    body = live.chat(**dict.fromkeys(nulls), **unknown)
    assert body.status_code == 200
    assert body.json()["choices"][0]["message"]["content"] == "ok"


def test_the_newer_limit_wins(live: Live) -> None:
    live.says("abcdefgh")
    body = live.chat(max_tokens=7, max_completion_tokens=3).json()
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_a_chat_may_fill_the_context(live: Live) -> None:
    body = live.chat(ignore_eos=True, temperature=0).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 512


def test_an_answer_is_continued(live: Live) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer"}]
    body = live.chat(
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=1,
        return_token_ids=True,
    ).json()
    text = live.engine.engine.tokenizer.decode(body["prompt_token_ids"], skip_special=False)
    assert text.endswith("assistant\nThe answer")


def test_thinking_can_be_left_out(live: Live) -> None:
    live.says(THOUGHT)
    body = live.chat(include_reasoning=False).json()
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": "It is 4.",
        "refusal": None,
    }
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Let me see.")
    text = str(live.chunks(include_reasoning=False))
    assert "reasoning" not in text


def test_a_model_that_only_thinks(live: Live) -> None:
    live.says("<think>Hmm", after="<|im_end|>")
    message = live.chat().json()["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "reasoning_content": "Hmm",
        "reasoning": "Hmm",
    }
