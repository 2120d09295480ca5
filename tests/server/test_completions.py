"""/v1/completions, /tokenize, /detokenize, /v1/models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.request import SamplingParams
from tests.server.live import NAME, USER, Live


def test_a_completion_has_the_shape_that_clients_read(live: Live) -> None:
    live.says(" there", "Hi")
    with live.client() as client:
        made = client.completions.create(model=NAME, prompt="Hi")
    assert made.id.startswith("cmpl-")
    assert made.object == "text_completion"
    assert made.choices[0].text == " there"
    assert made.choices[0].finish_reason == "stop"
    assert made.choices[0].logprobs is None


def test_sixteen_tokens_are_the_default(live: Live) -> None:
    usage = live.complete(ignore_eos=True).json()["usage"]
    assert usage["completion_tokens"] == 16


def test_a_stream_of_a_completion(live: Live) -> None:
    live.says("<think>so</think>four", "Hi")
    chunks = live.chunks("/v1/completions", max_tokens=20)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "four"
    assert "".join(choice.get("reasoning", "") for choice in choices) == "so"
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["text"] == ""


def test_several_prompts(live: Live) -> None:
    """Choices of the first prompt come first; each is what it would be alone."""
    ids = live.tokens("Hello you")
    fields = {"max_tokens": 6, "n": 2, "seed": 3, "temperature": 8.0, "ignore_eos": True}
    body = live.complete(prompt=["Hi", "Hello you"], **fields).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    alone = [live.complete(prompt=p, **fields).json() for p in ("Hi", ids)]
    texts = [choice["text"] for made in alone for choice in made["choices"]]
    assert [choice["text"] for choice in body["choices"]] == texts
    prompts = live.complete(prompt=[live.tokens("Hi"), ids], **fields).json()["choices"]
    assert [choice["text"] for choice in prompts] == texts
    assert body["usage"]["completion_tokens"] == 24
    streamed = [""] * 4
    for chunk in live.chunks("/v1/completions", prompt=["Hi", "Hello you"], **fields):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_logprobs_and_echo(live: Live) -> None:
    """As `lm_eval` scores a text."""
    body = live.complete(prompt="The fox", max_tokens=1, echo=True, logprobs=2).json()
    (choice,) = body["choices"]
    prompt = live.tokens("The fox")
    logprobs = choice["logprobs"]
    assert "prompt_logprobs" not in body
    assert choice["text"].startswith("The fox")
    assert "".join(logprobs["tokens"][: len(prompt)]) == "The fox"
    assert len(logprobs["tokens"]) == len(prompt) + 1
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    output = asyncio.run(live.engine.generate(prompt, params))
    assert output.prompt_logprobs is not None
    known = [each.logprob for each in output.prompt_logprobs]
    assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(known)
    for best, own in zip(logprobs["top_logprobs"][1:], logprobs["token_logprobs"][1:], strict=True):
        assert 2 <= len(best) <= 3
        assert own in best.values()


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_the_prompt_alone(live: Live, stream: bool) -> None:
    fields = {"prompt": "The fox", "max_tokens": 0, "echo": True}
    if stream:
        chunks = live.chunks("/v1/completions", **fields, stream_options={"include_usage": True})
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        finish, usage = chunks[-2]["choices"][0]["finish_reason"], chunks[-1]["usage"]
    else:
        body = live.complete(**fields, logprobs=0).json()
        (choice,) = body["choices"]
        text, finish, usage = choice["text"], choice["finish_reason"], body["usage"]
        assert len(choice["logprobs"]["tokens"]) == usage["prompt_tokens"]
    assert text == "The fox"
    assert finish == "length"
    assert usage["completion_tokens"] == 0


def test_prompt_logprobs(live: Live) -> None:
    body = live.complete(prompt="The fox", max_tokens=1, prompt_logprobs=1).json()
    first, *others = body["prompt_logprobs"][0]
    assert first is None
    for token, entry in zip(live.tokens("The fox")[1:], others, strict=True):
        assert 1 <= len(entry) <= 2
        assert str(token) in entry


def test_text_as_tokens_and_back(live: Live) -> None:
    body = live.post("/tokenize", {"prompt": "Hi there", "return_token_strs": True}).json()
    assert body["tokens"] == live.tokens("Hi there")
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 512
    assert "".join(body["token_strs"]) == "Hi there"
    text = live.post("/detokenize", {"tokens": body["tokens"]}).json()
    assert text == {"prompt": "Hi there"}
    chat = live.post("/tokenize", {"messages": USER}).json()
    assert chat["tokens"] == live.tokens(USER)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_what_can_t_be_tokenised(live: Live, path: str, body: Any, param: str) -> None:
    response = live.post(path, body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_what_is_served(live: Live) -> None:
    with live.client() as client:
        (card,) = client.models.list().data
        again = client.models.retrieve(NAME)
    assert card == again
    assert card.id == NAME
    assert card.object == "model"
    assert type(card.created) is int
    assert card.max_model_len == 512
    assert "thinking_token_budget" in card.taut["extra_body"]


def test_every_extra_that_a_card_lists_is_taken(live: Live) -> None:
    listed = live.http.get("/v1/models").json()["data"][0]["taut"]["extra_body"]
    values: dict[str, Any] = {
        "thinking_token_budget": 3,
        "reasoning_effort": "low",
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "stop_token_ids": [5],
        "allowed_token_ids": [5, 6],
        "prompt_logprobs": 1,
        "priority": 1,
        "request_id": "mine",
        "chat_template_kwargs": {"enable_thinking": True},
    }
    for name in listed:
        fields: dict[str, Any] = {name: values.get(name, True)}
        if name == "continue_final_message":
            fields["messages"] = [*USER, {"role": "assistant", "content": "So"}]
        assert live.chat(max_tokens=2, **fields).status_code == 200, name


def test_health_and_version(live: Live) -> None:
    assert live.http.get("/health").json() == {"status": "ok"}
    assert live.http.get("/version").json()["version"]
