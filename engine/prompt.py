"""What a caller asks: text, token ids or a conversation, and how it becomes the prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from engine.model.tokenizer import Tokenizer

Messages = Seq[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, and what its template is given beside the messages.

    `variables` are names that the template may read ("enable_thinking"). With
    `continue_final_message` the last message, an assistant's, is the beginning of the answer.
    """

    messages: Messages
    tools: Seq[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def render(self, tokenizer: Tokenizer) -> str:
        """The prompt's text. ValueError: the messages don't do, or the template says so."""
        if not self.continue_final_message:
            return self._apply(tokenizer, self.add_generation_prompt)
        beginning = _beginning(self.messages)
        text = self._apply(tokenizer, False)
        at = text.rfind(beginning)
        if at < 0:
            raise ValueError(
                "continue_final_message: the chat template doesn't show the last message as it is"
            )
        return text[: at + len(beginning)]

    def _apply(self, tokenizer: Tokenizer, add_generation_prompt: bool) -> str:
        return tokenizer.apply_chat_template(
            self.messages,
            add_generation_prompt=add_generation_prompt,
            tools=self.tools,
            variables=self.variables,
        )


def _beginning(messages: Messages) -> str:
    last = messages[-1] if messages else {}
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str) or not content.strip():
        raise ValueError(
            "continue_final_message: the last message must be an assistant's, with text to go on"
        )
    return content.strip()  # templates trim


Prompt = str | Seq[int] | Messages | Chat
"""Text, token ids, or chat messages."""


class ContextLengthExceeded(ValueError):
    """The prompt, or what it asks for, is longer than a sequence may be."""


class IdInUse(ValueError):
    """A live request has this id."""

    def __init__(self, id: str) -> None:
        super().__init__(f"the request id {id!r} is in use; ids of live requests are unique")


class Read(NamedTuple):
    """A prompt's tokens, and its messages if it was a conversation."""

    tokens: Seq[int]
    messages: Messages | None


def read(prompt: Prompt, tokenizer: Tokenizer, vocab_size: int) -> Read:
    """ValueError: it's no prompt, or of another vocabulary."""
    if isinstance(prompt, str):
        return Read(tokenizer.encode(prompt), None)
    if isinstance(prompt, Chat):
        return Read(tokenizer.encode(prompt.render(tokenizer), add_special=False), prompt.messages)
    if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Seq):
        raise ValueError(
            "a prompt is text, a list of token ids or a list of chat messages, "
            f"not {type(prompt).__name__}"
        )
    if all(isinstance(item, Mapping) for item in prompt) and prompt:
        return read(Chat(messages=cast(Messages, prompt)), tokenizer, vocab_size)
    for i, token in enumerate(prompt):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"a prompt is text, token ids or chat messages; item {i} is {token!r}")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"token id {token} at position {i} of the prompt is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
    return Read(cast(Seq[int], prompt), None)
