"""The vocabulary inside a GGUF file: byte-level BPE ("gpt2") or sentencepiece's BPE ("llama").

Both become a BPE of the `tokenizers` package. Sentencepiece has no list of merges: it joins the
neighbours whose union has the best score, so the merges are every way to cut a piece into two
pieces, best score first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer, Prepend, Replace
from tokenizers.normalizers import Sequence as Normalizers

from engine.model.pretokenizers import KINDS
from engine.model.vocabulary import (
    SPACE_MARK,
    ByteLevelPieces,
    Pieces,
    SpacePieces,
    Vocabulary,
)

log = logging.getLogger(__name__)


class TokenType(IntEnum):
    """GGUF's token types."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_SPECIAL = frozenset((TokenType.UNKNOWN, TokenType.CONTROL))
_ADDED = _SPECIAL | {TokenType.USER_DEFINED}


class _File:
    """A file's `tokenizer.ggml.*` keys."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self.list_of("tokens")
        self.types: list[int] = [TokenType.NORMAL] * len(self.tokens)
        if self.get("token_type", None) is not None:
            self.types = self.per_token("token_type")

    def get(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def list_of(self, key: str) -> list[Any]:
        found = self.get(key, None)
        if not isinstance(found, list):
            raise ValueError(f"tokenizer.ggml.{key} is missing: the file holds no whole tokenizer")
        return found

    def per_token(self, key: str) -> list[Any]:
        found = self.list_of(key)
        if len(found) != len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{key} has {len(found)} entries for {len(self.tokens)} tokens"
            )
        return found

    def token_id(self, name: str, default: int | None) -> int | None:
        found: int | None = self.get(f"{name}_token_id", default)
        if found is not None and not 0 <= found < len(self.tokens):
            raise ValueError(
                f"tokenizer.ggml.{name}_token_id is {found}, but there are "
                f"{len(self.tokens)} tokens"
            )
        return found


class _Model(NamedTuple):
    backend: Tokenizer
    pieces: Pieces
    add_bos: bool
    bos_id: int | None = None
    eos_id: int | None = None


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """ValueError names the key that is missing, of a wrong length or not supported."""
    return read_gguf(metadata)[1]


def read_gguf(metadata: Mapping[str, Any]) -> tuple[Tokenizer, Vocabulary]:
    """The vocabulary, and the tokenizer that encodes with it, but neither decodes nor adds BOS."""
    file = _File(metadata)
    name = file.get("model", None)
    if name not in _MODELS:
        raise ValueError(
            f"tokenizer.ggml.model is {name!r}; supported are {', '.join(map(repr, _MODELS))}"
        )
    vocab = {token: i for i, token in enumerate(file.tokens)}
    model = _MODELS[name](file, vocab)
    added = {i: file.tokens[i] for i, kind in enumerate(file.types) if kind in _ADDED}
    backend = model.backend
    backend.add_tokens(
        [
            AddedToken(content, normalized=False, special=file.types[i] in _SPECIAL)
            for i, content in added.items()
        ]
    )
    vocabulary = Vocabulary(
        size=len(file.tokens),
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        piece=dict(enumerate(file.tokens)).get,
        find=vocab.get,
        pieces=model.pieces,
        added=added,
        special_ids=frozenset(i for i in added if file.types[i] in _SPECIAL),
        bos_id=file.token_id("bos", model.bos_id),
        eos_id=file.token_id("eos", model.eos_id),
        add_bos=file.get("add_bos_token", model.add_bos),
        chat_template=metadata.get("tokenizer.chat_template"),
    )
    return backend, vocabulary


def _byte_level(file: _File, vocab: dict[str, int]) -> _Model:
    name = file.get("pre", None)
    if name is None:
        name = "default"
        log.warning("the file doesn't name its pre-tokenizer: text is cut as GPT-2 does")
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, a way to cut text that isn't known here; "
            f"known are {', '.join(KINDS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.list_of("merges")]
    try:
        backend = Tokenizer(BPE(vocab, merges, ignore_merges=kind.ignore_merges))
    except Exception as error:  # what the Rust side raises has no better type
        raise ValueError(f"tokenizer.ggml.merges don't fit the tokens: {error}") from error
    if (normalizer := kind.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    return _Model(backend, ByteLevelPieces(), kind.add_bos)


def _sentencepiece(file: _File, vocab: dict[str, int]) -> _Model:
    prefix = file.get("add_space_prefix", True)
    unknown = file.token_id("unknown", 0)
    backend = Tokenizer(
        BPE(
            vocab,
            _merges(file),
            unk_token=None if unknown is None else file.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    mark = Replace(" ", SPACE_MARK)
    steps: list[Normalizer] = [Prepend(SPACE_MARK), mark] if prefix else [mark]
    backend.normalizer = Normalizers(steps)
    pieces = SpacePieces(byte_fallback=TokenType.BYTE in file.types, strips_space=prefix)
    return _Model(backend, pieces, add_bos=True, bos_id=1, eos_id=2)


def _merges(file: _File) -> list[tuple[str, str]]:
    normal = {
        token: score
        for token, kind, score in zip(
            file.tokens, file.types, file.per_token("scores"), strict=True
        )
        if kind == TokenType.NORMAL
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in normal and piece[cut:] in normal
    ]


_MODELS: Mapping[str, Callable[[_File, dict[str, int]], _Model]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
