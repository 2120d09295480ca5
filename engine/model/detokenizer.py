"""Tokens to text, one token at a time: never half a character, never one lost."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection


class Detokenizer:
    """Text that became complete with each token; the bytes in between wait inside.

    Pushing ids and finishing gives what their joined bytes decode to at once, with U+FFFD for each
    maximal bad run, as Python's "replace" does. `skipped` ids give no text.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        skipped: Collection[int] = (),
        *,
        strip_space: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completed, often none."""
        data = self._token_bytes(token_id)
        return "" if token_id in self._skipped else self.push_bytes(data)

    def push_bytes(self, data: bytes) -> str:
        """The same for bytes that are no whole token."""
        return self._emit(self._utf8.decode(data))

    def finish(self) -> str:
        """What is left: incomplete bytes are U+FFFD."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
