"""The real command over the packaged models, driven by openai-python: what clients rely on, end to
end. Exact texts are the scripted model's (test_chat.py and others); of the abacus only what its
answers must have is asked, and one problem that is too short to get wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from engine import abacus
from engine.abacus.notation import answer_of
from tests.server.test_lifecycle import command, started

KEY = "a-key"
QUESTION = abacus.questions()[0]
RIGHT = answer_of(QUESTION)
ASK = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with command("abacus", "--port", "0", "--threads", "1", "--api-key", KEY) as process:
        url, said = started(process)
        text = "\n".join(said)
        for words in ("abacus", "thinking markers", "loop guard on", "1 key", "full cache"):
            assert words in text
        yield url
        process.terminate()
        assert process.wait(30) == 0


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    """Not typed as an OpenAI, since its overloads know no plain dicts."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120, max_retries=0) as client:
        yield client


def ask(client: Any, messages: list[dict[str, str]] = ASK, **fields: Any) -> Any:
    return client.chat.completions.create(model="abacus", messages=messages, **fields)


def streamed(client: Any, **fields: Any) -> tuple[str, str, list[Any]]:
    """Thinking, answer, and the chunks."""
    chunks = list(ask(client, stream=True, **fields))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    thinking = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    return thinking, "".join(delta.content or "" for delta in deltas), chunks


def test_it_thinks_and_answers(client: Any) -> None:
    whole = ask(client, stream=False)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content.strip() == RIGHT
    assert choice.message.reasoning_content == choice.message.reasoning != ""
    assert "think>" not in choice.message.content + choice.message.reasoning
    used = whole.usage
    thinking_tokens = used.completion_tokens_details.reasoning_tokens
    assert 0 < thinking_tokens < used.completion_tokens
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens
    assert whole.id.startswith("chatcmpl-")
    assert whole._request_id
    thinking, answer, chunks = streamed(client, stream_options={"include_usage": True})
    assert (thinking, answer) == (choice.message.reasoning, choice.message.content)
    assert len({(chunk.id, chunk.model, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == used.completion_tokens


def test_budgets_and_switches(client: Any) -> None:
    for budget in (0, 5):
        whole = ask(client, extra_body={"thinking_token_budget": budget})
        assert whole.usage.completion_tokens_details.reasoning_tokens == budget
        assert whole.choices[0].message.content
        assert whole.choices[0].finish_reason == "stop"
    off = ask(client, reasoning_effort="none")
    assert not hasattr(off.choices[0].message, "reasoning")
    assert off.choices[0].message.content
    hidden = ask(client, max_tokens=8, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning")
    assert hidden.usage.completion_tokens_details.reasoning_tokens > 0
    full = ask(client, max_completion_tokens=4)
    assert full.choices[0].finish_reason == "length"
    assert full.usage.completion_tokens == 4


def test_stop_strings_wait_for_the_answer(client: Any) -> None:
    (choice,) = ask(client, stop=[RIGHT]).choices
    assert RIGHT in choice.message.reasoning
    assert choice.message.content.strip() == ""
    assert choice.finish_reason == "stop"


def test_choices_of_one_seed(client: Any) -> None:
    fields: dict[str, Any] = {"n": 3, "seed": 7, "temperature": 20, "max_tokens": 12}
    first, again = (ask(client, **fields).choices for _ in range(2))
    assert first == again
    assert len({choice.message.content for choice in first}) == 3
    _, _, chunks = streamed(client, **fields)
    for index, choice in enumerate(first):
        deltas = [c.choices[0].delta for c in chunks if c.choices[0].index == index]
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content


def test_logprobs(client: Any) -> None:
    whole = ask(client, logprobs=True, top_logprobs=2, max_tokens=8)
    content = whole.choices[0].logprobs.content
    assert len(content) == whole.usage.completion_tokens, "those of the thinking too"
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)


def test_a_schema_binds_the_answer_alone(client: Any) -> None:
    named = {"name": "digit", "schema": SCHEMA}
    form = {"type": "json_schema", "json_schema": named}
    for budget in (0, 8):
        extra = {"thinking_token_budget": budget}
        whole = ask(client, response_format=form, extra_body=extra)
        assert json.loads(whole.choices[0].message.content) in range(10)
        assert whole.usage.completion_tokens_details.reasoning_tokens == budget


def test_a_conversation_goes_on(client: Any) -> None:
    first = ask(client).choices[0].message
    turns = (first.model_dump(exclude_none=True), {"role": "assistant", "content": first.content})
    extra = {"return_token_ids": True}
    with_thoughts, bare = (
        ask(client, [*ASK, turn, *ASK], max_tokens=1, extra_body=extra) for turn in turns
    )
    # its template shows no thoughts of earlier turns
    assert with_thoughts.prompt_token_ids == bare.prompt_token_ids


def test_completions_and_tokens(client: Any, url: str) -> None:
    texts = ["a=3 b=5;", "a=3 b=6;"]
    made = client.completions.create(model="abacus", prompt=texts, max_tokens=3, echo=True)
    assert [choice.index for choice in made.choices] == [0, 1]
    assert all(c.text.startswith(text) for c, text in zip(made.choices, texts, strict=True))
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers) as http:
        tokens = http.post("/tokenize", json={"prompt": texts[0]}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == texts[0]
        assert "taut:thinking_tokens_total" in http.get("/metrics").text
        assert http.get("/health").json() == {"status": "ok"}


def test_its_card(client: Any) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len) == ("abacus", 2048)
    assert card.taut["thinks"]
    assert not card.taut["calls_tools"]


def test_refusals(client: Any, url: str) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool]}, "tools"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"chat_template_kwargs": {"style": 1}}}, "chat_template_kwargs.style"),
        ({"max_tokens": 4096}, "max_tokens"),
    ]
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **fields)
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError, match="abacus"):
        client.chat.completions.create(model="gpt-4", messages=ASK)
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_client_that_leaves(client: Any, url: str) -> None:
    stream = ask(client, n=4, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client).choices[0].message.content.strip() == RIGHT
    page = httpx.get(f"{url}/metrics").text
    assert 'request_success_total{finished_reason="abort",model_name="abacus"} 1.0' in page
    assert 'num_requests_running{model_name="abacus"} 0.0' in page


CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.mark.packaged
def test_a_model_of_words_answers() -> None:
    with command("smollm2", "--port", "0", "--max-model-len", "1024") as process:
        url, said = started(process)
        assert any(line.startswith("linear") and "chosen" in line for line in said)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
            chat = client.chat.completions
            fields = {"model": "smollm2", "messages": CAPITAL, "temperature": 0, "max_tokens": 24}
            whole = chat.create(**fields)  # type: ignore[call-overload]
            stream = chat.create(**fields, stream=True)  # type: ignore[call-overload]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert "Paris" in whole.choices[0].message.content
            assert text == whole.choices[0].message.content
            again = chat.create(**fields)  # type: ignore[call-overload]
            assert again.usage.prompt_tokens_details.cached_tokens > 0
            budget = {"thinking_token_budget": 4}
            short = chat.create(**fields, extra_body=budget)  # type: ignore[call-overload]
            assert "\\boxed{" in short.choices[0].message.content
        process.terminate()
        assert process.wait(30) == 0
