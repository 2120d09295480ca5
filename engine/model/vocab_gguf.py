"""The vocabulary inside a GGUF file: byte-level BPE ("gpt2") or sentencepiece's BPE ("llama").

Both become a BPE of the `tokenizers` package. Sentencepiece has no list of merges: it joins the
neighbours whose union has the best score, so the merges are every way to cut a piece into two
pieces, best score first.
"""

from __future__ import annotations

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


class _Read(NamedTuple):
    """A file's lists, and its scalars by the end of their keys."""

    tokens: list[str]
    types: list[int]
    get: Callable[[str, Any], Any]
    list_of: Callable[[str], list[Any]]


class _Model(NamedTuple):
    backend: Tokenizer
    pieces: Pieces
    add_bos: bool
    bos_id: int | None = None
    eos_id: int | None = None


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """ValueError names the key that is missing, of a wrong length or not supported."""
    read = _read(metadata)
    name = read.get("model", None)
    if name not in _MODELS:
        raise ValueError(
            f"tokenizer.ggml.model is {name!r}; supported are {', '.join(map(repr, _MODELS))}"
        )
    vocab = {token: i for i, token in enumerate(read.tokens)}
    model = _MODELS[name](read, vocab)
    added = {i: read.tokens[i] for i, kind in enumerate(read.types) if kind in _ADDED}
    backend = model.backend
    backend.add_tokens([AddedToken(content, normalized=False) for content in added.values()])
    return Vocabulary(
        size=len(read.tokens),
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        piece=read.tokens.__getitem__,
        find=vocab.get,
        pieces=model.pieces,
        added=added,
        special_ids=frozenset(i for i in added if read.types[i] in _SPECIAL),
        bos_id=read.get("bos_token_id", model.bos_id),
        eos_id=read.get("eos_token_id", model.eos_id),
        add_bos=read.get("add_bos_token", model.add_bos),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _read(metadata: Mapping[str, Any]) -> _Read:
    def get(key: str, default: Any) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    def list_of(key: str) -> list[Any]:
        found = get(key, None)
        if not isinstance(found, list):
            raise ValueError(f"tokenizer.ggml.{key} is missing: the file holds no whole tokenizer")
        return found

    tokens = list_of("tokens")
    types = get("token_type", [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return _Read(tokens, types, get, list_of)


def _byte_level(read: _Read, vocab: dict[str, int]) -> _Model:
    name = read.get("pre", "default")
    kind = KINDS.get(name)
    if kind is None:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, a way to cut text that isn't known here; "
            f"known are {', '.join(KINDS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in read.list_of("merges")]
    backend = _backend(vocab, merges, ignore_merges=kind.ignore_merges)
    if (normalizer := kind.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    return _Model(backend, ByteLevelPieces(), kind.add_bos)


def _sentencepiece(read: _Read, vocab: dict[str, int]) -> _Model:
    scores = read.list_of("scores")
    if len(scores) != len(read.tokens):
        raise ValueError(
            f"tokenizer.ggml.scores has {len(scores)} entries for {len(read.tokens)} tokens"
        )
    prefix = read.get("add_space_prefix", True)
    unknown = read.get("unknown_token_id", 0)
    backend = _backend(
        vocab,
        _merges(read, scores),
        unk_token=read.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    mark = Replace(" ", SPACE_MARK)
    steps: list[Normalizer] = [Prepend(SPACE_MARK), mark] if prefix else [mark]
    backend.normalizer = Normalizers(steps)
    pieces = SpacePieces(byte_fallback=TokenType.BYTE in read.types, strips_space=prefix)
    return _Model(backend, pieces, add_bos=True, bos_id=1, eos_id=2)


def _merges(read: _Read, scores: list[float]) -> list[tuple[str, str]]:
    normal = {
        token: score
        for token, kind, score in zip(read.tokens, read.types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(normal, key=normal.__getitem__, reverse=True)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in normal and piece[cut:] in normal
    ]


def _backend(vocab: dict[str, int], merges: list[Any], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab, merges, **options))
    except Exception as error:  # what the Rust side raises has no better type
        raise ValueError(f"tokenizer.ggml.merges don't fit the tokens: {error}") from error


_MODELS: Mapping[str, Callable[[_Read, dict[str, int]], _Model]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
