"""Grammars by llguidance: which tokens may come next if the answer is to have a form.

A matcher works on the tokens' exact bytes, so it serves every kind of vocabulary file. Compiling
takes milliseconds to seconds and belongs into a caller's thread; a mask takes some tens of
microseconds. What a client's schema can do is bounded: its size here, time and memory of every mask
by llguidance's own limits; nothing is ever fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from engine.request import Grammar, GrammarError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_BYTES = 128 * 1024

_STACK_BYTES = 256 << 20
"""For compiling: llguidance recurses by about 5 kB for each level of a schema, `$ref`s followed,
and a text of MAX_TEXT_BYTES can have 13,000. Only what is used becomes memory."""

_JSON: JsonCompileOptions = {
    "whitespace_flexible": False,  # a weak model would go on with white space for ever
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,  # a keyword that can't be enforced is refused, whatever the schema says
}

T = TypeVar("T")


class Vocabulary(Protocol):
    """What a grammar needs of a tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]
    bos_id: int | None

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, *, add_special: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Makes matchers for one vocabulary. Safe to share between threads.

    `end_ids` end a sequence: they are allowed where the answer may end. The vocabulary is read with
    the first grammar, which takes about a second; call `warm` to have that behind you.
    """

    def __init__(self, vocabulary: Vocabulary, end_ids: Seq[int]) -> None:
        self._vocabulary = vocabulary
        self._end_ids = tuple(end_ids)
        self._lock = threading.Lock()

    def warm(self) -> None:
        with self._lock:
            _ = self._tokenizer

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """At the grammar's start. GrammarError: it is malformed, unsupported or too large."""
        if len(grammar.text.encode(errors="surrogatepass")) > MAX_TEXT_BYTES:
            raise GrammarError(f"grammar: its text is longer than {MAX_TEXT_BYTES} bytes")
        self.warm()
        return _on_a_deep_stack(lambda: self._compile(grammar))

    def _compile(self, grammar: Grammar) -> GrammarMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            if grammar.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
            else:
                text = LLMatcher.grammar_from_lark(grammar.text)
            limits = LLParserLimits(verbose_errors=False)
            made = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(f"grammar: {_first_line(str(error))}") from error
        if made.is_error():
            raise GrammarError(f"grammar: {_first_line(made.get_error())}")
        if warnings := made.get_grammar_warnings():
            raise GrammarError(f"grammar: {_first_line(warnings[0])}")
        return GrammarMatcher(made)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise GrammarError("grammar: needs the package llguidance; install it") from error
        tokens = _Tokens(self._vocabulary, self._end_ids)
        return LLTokenizer(
            TokenizerWrapper(tokens),
            n_vocab=len(tokens.tokens),
            eos_token=tokens.end_ids,
            slices=LLTokenizer.json_slices(),
        )


class _Tokens:
    """A vocabulary as llguidance reads it; one without an end gets one behind its last id."""

    def __init__(self, vocabulary: Vocabulary, end_ids: Seq[int]) -> None:
        self._vocabulary = vocabulary
        self.tokens = [vocabulary.token_bytes(i) for i in range(vocabulary.vocab_size)]
        self.end_ids = list(end_ids) or [len(self.tokens)]
        if not end_ids:
            self.tokens.append(b"<end>")
        self.eos_token_id = self.end_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.special_token_ids = sorted({*vocabulary.special_ids, *self.end_ids})

    def __call__(self, text: bytes) -> list[int]:
        """How the model would spell this in the middle of a text.

        Tokens that aren't exactly these bytes would make the grammar contradict itself. Where a
        tokenizer puts a space in front it is asked behind a newline; then the longest tokens do.
        """
        for lead in (b"", b"\n"):
            ids = self._vocabulary.encode((lead + text).decode(), add_special=False)
            spelled = [self.tokens[i] for i in ids]
            for first in range(min(len(ids), 3)):
                if b"".join(spelled[first:]) == text:
                    return ids[first:]
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[text[at:end]])
            at = end
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {data: i for i, data in enumerate(self.tokens) if data and i not in special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))


class GrammarMatcher:
    """`engine.request.Matcher` by llguidance."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def done(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> bytes:
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def accept(self, token: int) -> bool:
        taken = self._matcher.try_consume_tokens([token])
        self._check()
        return taken == 1

    def rewind(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)
            self._check()

    def _check(self) -> None:
        """GrammarError: a limit of time or memory was met; it is of no use any more."""
        if self._matcher.is_error():
            raise GrammarError(f"grammar: {_first_line(self._matcher.get_error())}")

    def fork(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy())


def _first_line(message: str) -> str:
    return message.partition("\n")[0][:300]


_STACKS = threading.Lock()
"""The size of new threads' stacks is the process's: one change at a time, or it would stay."""


def _on_a_deep_stack(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as pool:
        with _STACKS:
            usual = threading.stack_size(_STACK_BYTES)
            try:
                made = pool.submit(call)  # starts the thread
            finally:
                threading.stack_size(usual)
        return made.result()
