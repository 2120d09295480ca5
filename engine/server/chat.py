"""The answer of /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, cast

from engine.output import Choice, Output
from engine.request import TokenLogprob
from engine.server.logprobs import chat_logprobs
from engine.server.openai import Asked
from engine.server.replies import Part, Reply, Served
from engine.server.shapes import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
)
from engine.server.tool_parser import Event, Text, ToolCallParser
from engine.server.tools import Answer, parse_answer, tool_call, tool_call_delta


class ChatReply(Reply[ChatCompletion, ChatChunk]):
    """A chat's answer: text, and calls of tools where the request offers some."""

    chunk_object = "chat.completion.chunk"

    def __init__(self, asked: Asked, served: Served, id: str, model: str) -> None:
        super().__init__(asked, served, id, model)
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(ToolCallParser)

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
        answer = parse_answer(choice.text) if self.asked.tools else Answer(choice.text, ())
        message = {
            "role": "assistant",
            "content": answer.content or ("" if not answer.calls else None),
            "refusal": None,
            **self.thinking(choice.thinking),
        }
        if answer.calls:
            message["tool_calls"] = [tool_call(*call) for call in answer.calls]
        made = {
            "index": choice.index,
            "message": cast(ChatMessage, message),
            "logprobs": self._logprobs(choice.logprobs or ()),
            **self.end_of(choice),
        }
        made["finish_reason"] = _ended(made["finish_reason"], len(answer.calls))
        return cast(ChatChoice, made)

    def _logprobs(self, known: Seq[TokenLogprob]) -> ChatLogprobs | None:
        if self.asked.params.logprobs is None:
            return None
        return chat_logprobs(self.served.tokenizer, known)

    def _begin(self, prompt: int, index: int) -> Iterator[ChatChunk]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield cast(ChatChunk, self.chunk_of(choice))

    def _say(self, index: int, text: str) -> Iterator[ChatChunk]:
        if not self.asked.tools:
            yield from super()._say(index, text)
        else:
            yield from self._events(index, self._parsers[index].feed(text))

    def _events(self, index: int, events: Seq[Event]) -> Iterator[ChatChunk]:
        for event in events:
            if isinstance(event, Text):
                yield self._chunk(Part(index, text=event.text))
            else:
                yield self._chunk(Part(index, call=tool_call_delta(event)))

    def _end(
        self, index: int, reason: FinishReason, detail: str | int | None
    ) -> Iterator[ChatChunk]:
        parser = self._parsers[index]
        yield from self._events(index, parser.finish())
        yield from super()._end(index, _ended(reason, parser.calls), detail)

    def _chunk(self, part: Part) -> ChatChunk:
        logprobs, ids = self.take(part.choice)
        delta = self._delta(part)
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

    def _delta(self, part: Part) -> dict[str, Any]:
        if part.call is not None:
            return {"tool_calls": [part.call]}
        return self.thinking(part.thinking) or ({"content": part.text} if part.text else {})


def _ended(reason: FinishReason, calls: int) -> FinishReason:
    """An answer that is whole and calls ends so that the client answers the calls."""
    return "tool_calls" if reason == "stop" and calls else reason
