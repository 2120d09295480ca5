"""/metrics and /openapi.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema_rs
from prometheus_client.parser import text_string_to_metric_families

from engine.cache.policy import KVSpec
from engine.cache.registry import policy_from_text
from engine.config import EngineConfig, ModelSpec
from tests.server.live import NAME, USER, Live, serving


def families(live: Live) -> dict[str, Any]:
    return {f.name: f for f in text_string_to_metric_families(live.http.get("/metrics").text)}


def test_names_that_dashboards_know(live: Live) -> None:
    known = (
        "num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions "
        "prompt_tokens generation_tokens time_to_first_token_seconds request_success "
        "time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
        "thinking_tokens kv_cache_bytes kv_cells_evicted ran_tokens edits loops early_stops"
    )
    live.chat(max_tokens=1)
    found = families(live)
    for name in known.split():
        assert f"taut:{name}" in found, name
        for sample in found[f"taut:{name}"].samples:
            assert sample.labels["model_name"] == NAME


def test_what_a_request_counts(live: Live) -> None:
    live.says("<think>plan</think>42")
    usage = live.chat().json()["usage"]
    live.chunks(thinking_token_budget=2, n=2)
    details = usage["completion_tokens_details"]
    assert live.metric("taut:prompt_tokens_total") == 2 * usage["prompt_tokens"]
    assert live.metric("taut:thinking_tokens_total") == details["reasoning_tokens"] + 2 * 2
    assert live.metric("taut:generation_tokens_total") > 3 * 5
    assert live.metric("taut:request_success_total", finished_reason="stop") == 3
    assert live.metric("taut:edits_total", controller="ThinkingBudget") == 2
    assert live.metric("taut:early_stops_total") == 2
    assert live.metric("taut:time_to_first_token_seconds_count") == 2
    assert live.metric("taut:request_queue_time_seconds_count") == 2
    assert live.metric("taut:ran_tokens_total", role="main") > 0


def test_errors_are_counted(live: Live) -> None:
    live.chat(n=0)
    live.chat(model="x")
    live.chat(model="y")
    assert live.metric("taut:request_errors_total", status="400") == 1
    assert live.metric("taut:request_errors_total", status="404") == 2


def test_the_cache_while_it_is_used(config: EngineConfig) -> None:
    kv = KVSpec(policy=policy_from_text("sinks_recent"), budget_tokens=32, window=16)
    spec = config.models["main"]
    bounded = replace(config, models={"main": ModelSpec(spec.model, kv=kv)})
    with serving(bounded) as live:
        assert live.metric("taut:kv_cache_bytes", format="float32") == 0
        live.pace(0.005)
        with live.client() as client:
            stream = client.chat.completions.create(
                model=NAME,
                messages=USER,
                stream=True,
                max_tokens=120,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            assert live.metric("taut:num_requests_running") == 1
            assert live.metric("taut:kv_cache_bytes", format="float32") > 0
            assert 0 < live.metric("taut:kv_cache_usage_perc") <= 1
            list(stream)
        assert live.metric("taut:kv_cells_evicted_total", role="main") > 0


def test_answers_are_what_the_document_says(live: Live) -> None:
    document = live.http.get("/openapi.json").json()
    live.says("<think>plan</think>42")

    def check(name: str, value: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.validate(schema, value)

    fields = {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": True}
    check("ChatRequest", {"messages": USER, **fields})
    check("ChatCompletion", live.chat(**fields).json())
    check("ChatCompletion", live.chat().json())
    for chunk in live.chunks(logprobs=True, stream_options={"include_usage": True}):
        check("ChatChunk", chunk)
    check("Completion", live.complete(echo=True, logprobs=2, prompt_logprobs=1).json())
    for chunk in live.chunks("/v1/completions", logprobs=1, echo=False):
        check("CompletionChunk", chunk)
    check("ModelList", live.http.get("/v1/models").json())
    check("ModelCard", live.http.get(f"/v1/models/{NAME}").json())
    check("Tokens", live.post("/tokenize", {"prompt": "a"}).json())
    check("ErrorBody", live.chat(n=0).json())
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
