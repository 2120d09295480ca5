"""Request bodies, field by field as OpenAI, vLLM and llama.cpp spell them.

A null is the default, as clients send nulls. Types are strict ("stream": "true" is refused); ranges
are `SamplingParams`' to check. Unknown fields are kept in `model_extra`: some are understood and
refused (controls.py), the others ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Role = Literal["system", "developer", "user", "assistant", "tool"]

MAX_CHOICES = 128
MAX_STOPS = 64


class Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingFields(Body):
    """What chat and completions share."""

    thinking_token_budget: int | None = Field(
        default=None, description="Thinking is closed after exactly so many tokens; -1: no budget."
    )
    reasoning_effort: str | None = Field(
        default=None, description="A budget by name; the model's card has the table."
    )
    stop_in_thinking: bool | None = Field(
        default=None,
        description="Stop strings end the thinking too; else they wait for the answer.",
    )
    include_reasoning: bool | None = Field(
        default=None, description="false: thinking is generated and counted, but not sent."
    )
    model: str | None = Field(
        default=None, description="A name of /v1/models; left out: the one served."
    )
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=0)
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(default=None, description="Lower runs first.")
    request_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        pattern=r"^[\w.:\-]+$",
        description="Unique while live.",
    )
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    kv_budget: int | Literal["full"] | None = Field(
        default=None, description="Cells that a kv head keeps, at most the server's own number."
    )
    user: str | None = None


class Message(Body):
    role: Role
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class TemplateFields(Body):
    """How a conversation becomes a prompt."""

    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(TemplateFields, SamplingFields):
    max_completion_tokens: int | None = Field(default=None, ge=1, description="Thinking included.")
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(SamplingFields):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(Body):
    """A text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


def given(body: Body) -> Mapping[str, Any]:
    """The fields with a value, unknown ones too, as the client sent them."""
    return {name: value for name, value in body if value is not None}
