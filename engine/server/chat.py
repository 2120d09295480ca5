"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import cast

from engine.output import Choice, Output
from engine.request import TokenLogprob
from engine.server.logprobs import chat_logprobs
from engine.server.replies import Part, Reply
from engine.server.shapes import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
)


class ChatReply(Reply[ChatCompletion, ChatChunk]):
    """A chat's answer."""

    chunk_object = "chat.completion.chunk"

    def _answer(self, outputs: Seq[Output]) -> ChatCompletion:
        (output,) = outputs
        made = {
            **self.head("chat.completion"),
            "choices": [self._choice(choice) for choice in output.choices],
            "usage": self.usage_of(outputs),
        }
        if self.asked.token_ids:
            made["prompt_token_ids"] = list(output.prompt_token_ids)
        if self.asked.prompt_logprobs:
            made["prompt_logprobs"] = self.prompt_logprobs(output)
        return cast(ChatCompletion, made)

    def _choice(self, choice: Choice) -> ChatChoice:
        message = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            **self.thinking(choice.thinking),
        }
        return cast(
            ChatChoice,
            {
                "index": choice.index,
                "message": cast(ChatMessage, message),
                "logprobs": self._logprobs(choice.logprobs or ()),
                **self.end_of(choice),
            },
        )

    def _logprobs(self, known: Seq[TokenLogprob]) -> ChatLogprobs | None:
        if self.asked.params.logprobs is None:
            return None
        return chat_logprobs(self.served.tokenizer, known)

    def _begin(self, prompt: int, index: int) -> Iterator[ChatChunk]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield cast(ChatChunk, self.chunk_of(choice))

    def _chunk(self, part: Part) -> ChatChunk:
        logprobs, ids = self.take(part.choice)
        delta = self.thinking(part.thinking) or ({"content": part.text} if part.text else {})
        choice = {
            "index": part.choice,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": part.finish_reason,
            **ids,
        }
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        return cast(ChatChunk, self.chunk_of(choice))
