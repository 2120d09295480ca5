"""What is refused, with which status, and that the message names the field and the fix."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config import EngineConfig
from tests.server.live import NAME, USER, Live, serving
from tests.server.sockets import open_stream, request, talk


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 81}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": "x"}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": "10"}, "thinking_token_budget"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
        ),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"kv_budget": 64}, "kv_budget"),
        ({"kv_budget": "most"}, "kv_budget"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"type": "string", "pattern": "("}},
                }
            },
            "response_format",
        ),
        ({"repetition_detection": {"min_count": 2}}, "repetition_detection"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"cache_salt": "x"}, "cache_salt"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"separate_reasoning": False}, "separate_reasoning"),
    ],
)
def test_bad_fields_of_a_chat(live: Live, fields: dict[str, Any], param: str) -> None:
    error = error_of(live.chat(**fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[0]"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1, "stream": True}, "logprobs"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"prompt": ["a"] * 81}, "prompt"),
    ],
)
def test_bad_fields_of_a_completion(live: Live, fields: dict[str, Any], param: str) -> None:
    assert error_of(live.complete(**fields))["param"] == param


@pytest.mark.parametrize(
    "data", [b"", b"nope", b"[]", b"5", b"\xff", b"{" * 9999, b'{"a":"\\ud800"}']
)
def test_a_body_that_is_no_request(live: Live, data: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(live.http.post("/v1/chat/completions", content=data, headers=headers))


def test_an_error_echoes_little(live: Live) -> None:
    error = error_of(live.chat(temperature="x" * 10**6))
    assert len(error["message"]) < 300
    error = error_of(live.chat(model="x" * 10**6), 404)
    assert len(error["message"]) < 300


def test_a_context_that_is_too_long(live: Live) -> None:
    """In words that LiteLLM recognises."""
    for fields in ({"prompt": [5] * 600}, {"prompt": [5] * 500, "max_tokens": 13}):
        error = error_of(live.complete(**fields))
        assert error["code"] == "context_length_exceeded"
        assert "this model's maximum context length is" in error["message"]
    error = error_of(live.chat(max_completion_tokens=512))
    assert error["param"] == "max_completion_tokens"
    assert live.complete(prompt=[5] * 500, max_tokens=12, ignore_eos=True).status_code == 200


def test_another_model(live: Live) -> None:
    for response in (live.chat(model="gpt-4"), live.http.get("/v1/models/gpt-4")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert NAME in error["message"]
    for name in (NAME, "", None):
        assert live.chat(model=name, max_tokens=1).status_code == 200


def test_routes_and_methods(live: Live) -> None:
    assert "/openapi.json" in error_of(live.http.get("/v1/nothing"), 404)["message"]
    response = live.http.get("/v1/chat/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_a_body_of_another_kind(live: Live) -> None:
    data = json.dumps({"messages": USER, "max_tokens": 1})
    url = "/v1/chat/completions"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    error_of(live.http.post(url, content=data, headers=headers), 415)
    headers = {"content-type": "application/json; charset=utf-8"}
    assert live.http.post(url, content=data, headers=headers).status_code == 200


def test_a_template_that_refuses(live: Live) -> None:
    engine = live.engine.engine
    engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    error = error_of(live.chat())
    assert error["param"] == "messages"
    assert "roles must alternate" in error["message"]
    engine.tokenizer.chat_template = None
    assert "no chat template" in error_of(live.chat())["message"]


def test_a_body_that_is_too_long(config: EngineConfig) -> None:
    with serving(config, max_body_bytes=2000) as live:
        error_of(live.chat(user="x" * 3000), 413)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        status, body = talk(live, head + b"bb8\r\n" + b"x" * 3000 + b"\r\n")
        assert status == 413
        assert "--max-body-bytes" in body["error"]["message"]
        assert live.chat(user="x" * 1000, max_tokens=1).status_code == 200


def test_a_head_that_is_too_long(config: EngineConfig) -> None:
    with serving(config, max_header_bytes=4000) as live:
        status, _ = talk(live, request("/v1/completions", {}, "X-Long: " + "x" * 9000))
        assert status == 400
        assert live.chat(max_tokens=1).status_code == 200


def test_a_prompt_limit_below_the_context(config: EngineConfig) -> None:
    with serving(config, max_prompt_tokens=20) as live:
        error = error_of(live.complete(prompt=[5] * 21))
        assert error["code"] == "context_length_exceeded"
        assert live.complete(prompt=[5] * 20).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_fails(live: Live, stream: bool) -> None:
    """One error, in OpenAI's shape, and the server goes on."""
    decoder = live.says("abcdefgh")
    script, prompt = decoder.script, len(live.tokens(USER))

    def failing(position: int) -> int:
        if position == prompt + 2:
            raise RuntimeError("no memory")
        return script(position)

    decoder.script = failing
    if stream:
        events = live.events("/v1/chat/completions", {"messages": USER})
        assert events[-1].data is None
        error = events[-2].data["error"]
        assert "".join(e.data["choices"][0]["delta"].get("content", "") for e in events[:-2])
    else:
        error = error_of(live.chat(), 500)
    assert "no memory" in error["message"]
    assert error["type"] == "server_error"
    assert live.metric("taut:request_errors_total", status="500") == 1
    decoder.script = script
    assert live.chat().json()["choices"][0]["message"]["content"] == "abcdefgh"


def test_openai_python_raises_on_an_error_inside_a_stream(live: Live) -> None:
    import openai

    decoder = live.says("ab")
    decoder.script = lambda position: 1 // 0
    with live.client() as client:
        stream = client.chat.completions.create(model=NAME, messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="division"):
            list(stream)


def test_bad_requests_beside_a_stream(live: Live) -> None:
    live.pace(0.003)
    fields = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True}
    expected = live.chat(**fields).json()["choices"][0]["token_ids"]
    with open_stream(live, **fields) as stream:
        stream.read_chunks(2)
        for body in ({"messages": 5}, {"n": -1}, {"logit_bias": {"x": 1}}, {"stop": [1]}):
            error_of(live.chat(**body))
        rest = stream.read_all()
    got = [t for chunk in rest for t in chunk["choices"][0].get("token_ids", [])]
    assert got == expected[len(expected) - len(got) :]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
