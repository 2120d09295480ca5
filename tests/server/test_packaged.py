"""The real command over the packaged model, driven by openai-python."""

from __future__ import annotations

import pytest
from openai import OpenAI

from tests.server.test_lifecycle import command, started

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.mark.packaged
def test_a_real_model_answers() -> None:
    with command("smollm2", "--port", "0", "--max-model-len", "1024") as process:
        url, said = started(process)
        assert any(line.startswith("linear") and "chosen" in line for line in said)
        with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
            chat = client.chat.completions
            fields = {"model": "smollm2", "messages": ASK, "temperature": 0, "max_tokens": 24}
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
