"""Keys, web pages, request ids."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from engine.config import EngineConfig
from tests.server.live import NAME, USER, Live, serving

KEYS = ("secret-1", "schlüssel", " with-spaces\n", "\udcff\udcfe")  # the last: bytes of an argument


@pytest.fixture(scope="module")
def locked(config: EngineConfig) -> Iterator[Live]:
    with serving(config, api_key=KEYS, allowed_origins=("https://page.example",)) as live:
        yield live


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1", "Bearer secret-12"],
)
def test_a_wrong_key(locked: Live, header: str) -> None:
    headers = {"Authorization": header} if header else {}
    for path in ("/v1/models", "/v1/nothing", "/v1/models/x"):
        response = locked.http.get(path, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["x-request-id"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        assert locked.http.post(path, json={}, headers=headers).status_code == 401


def test_every_key_is_good(locked: Live) -> None:
    with locked.client(KEYS[0]) as client:
        assert client.models.list().data[0].id == NAME
    for key in (KEYS[1].encode(), b"with-spaces", b"  with-spaces", b"\xff\xfe"):
        headers = {b"Authorization": b"Bearer " + key}
        assert locked.http.get("/v1/models", headers=headers).status_code == 200
    for key in (KEYS[1].encode("latin-1"), b"\xff", b"with"):
        headers = {b"Authorization": b"Bearer " + key}
        assert locked.http.get("/v1/models", headers=headers).status_code == 401


def test_openai_python_names_it(locked: Live) -> None:
    with (
        locked.client("wrong") as client,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        client.chat.completions.create(model=NAME, messages=USER)


@pytest.mark.parametrize("path", ["/health", "/version", "/metrics", "/openapi.json"])
def test_what_needs_no_key(locked: Live, path: str) -> None:
    assert locked.http.get(path).status_code == 200


def test_a_page_that_may_call(locked: Live) -> None:
    ask = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization, content-type"
    response = locked.http.options("/v1/chat/completions", headers=ask)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    refused = locked.http.get("/v1/models", headers={"Origin": "https://page.example"})
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    other = locked.http.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_no_page_may_call_unless_asked(live: Live) -> None:
    headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in live.http.get("/health", headers=headers).headers
    assert live.http.options("/v1/models", headers=headers).status_code == 405


def test_request_ids(live: Live) -> None:
    own = live.http.get("/version", headers={"x-request-id": "abc"})
    assert own.headers["x-request-id"] == "abc"
    ids = {live.http.get("/version").headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2
    long = live.http.get("/version", headers={"x-request-id": "x" * 500})
    assert len(long.headers["x-request-id"]) == 32
