"""The answer of /v1/completions: `text` goes on from the prompt.

A model's thinking is kept apart from it, as in a chat, under `reasoning_content` and `reasoning`.
With several prompts the choices of the first come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import cast

from engine.output import Choice, Output
from engine.request import TokenLogprob
from engine.server.logprobs import completion_logprobs
from engine.server.openai import Asked
from engine.server.replies import Part, Reply, Served
from engine.server.shapes import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
)


class CompletionReply(Reply[Completion, CompletionChunk]):
    """A completion's answer."""

    chunk_object = "text_completion"

    def __init__(self, asked: Asked, served: Served, id: str, model: str) -> None:
        super().__init__(asked, served, id, model)
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters said, by choice

    def _answer(self, outputs: Seq[Output]) -> Completion:
        made = {
            **self.head("text_completion"),
            "choices": [
                self._choice(number, output, choice)
                for number, output in enumerate(outputs)
                for choice in output.choices
            ],
            "usage": self.usage_of(outputs),
        }
        if self.asked.token_ids:
            made["prompt_token_ids"] = [list(output.prompt_token_ids) for output in outputs]
        if self.asked.prompt_logprobs:
            made["prompt_logprobs"] = [self.prompt_logprobs(output) for output in outputs]
        return cast(Completion, made)

    def _choice(self, number: int, output: Output, choice: Choice) -> CompletionChoice:
        index = number * self.asked.params.n + choice.index
        prompt, known = "", list[TokenLogprob | int]()
        if self.asked.echo:
            prompt = self._echoed(number)
            known = [output.prompt_token_ids[0], *(output.prompt_logprobs or ())]
        made = {
            "index": index,
            "text": prompt + choice.text,
            "logprobs": self._logprobs(index, [*known, *(choice.logprobs or ())]),
            **self.thinking(choice.thinking),
            **self.end_of(choice),
        }
        return cast(CompletionChoice, made)

    def _logprobs(self, index: int, known: Seq[TokenLogprob | int]) -> CompletionLogprobs | None:
        if self.asked.params.logprobs is None:
            return None
        made = completion_logprobs(self.served.tokenizer, known, self._offsets[index])
        self._offsets[index] += sum(map(len, made["tokens"]))
        return made

    def _echoed(self, number: int) -> str:
        prompt = self.asked.prompts[number]
        if isinstance(prompt, str):
            return prompt
        return self.served.tokenizer.decode(cast("Seq[int]", prompt), skip_special=False)

    def _begin(self, prompt: int, index: int) -> Iterator[CompletionChunk]:
        if self.asked.echo:
            yield self._chunk(Part(index, text=self._echoed(prompt)))

    def _chunk(self, part: Part) -> CompletionChunk:
        logprobs, ids = self.take(part.choice)
        choice = {
            "index": part.choice,
            "text": part.text,
            "logprobs": self._logprobs(part.choice, logprobs) if logprobs else None,
            "finish_reason": part.finish_reason,
            **self.thinking(part.thinking),
            **ids,
        }
        if part.finish_reason is not None:
            choice["stop_reason"] = part.stop_reason
        return cast(CompletionChunk, self.chunk_of(choice))
