"""The vocabulary in a tokenizer.model, through the `sentencepiece` package.

Sentencepiece doesn't parse control tokens and knows nothing of tokens that were added later: those
are split out of the text first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from engine.model.vocab_folder import FolderConfig
from engine.model.vocabulary import SPACE_MARK, SpacePieces, Vocabulary

# normalizer_spec { add_dummy_prefix: false }: protobuf lets a later field override an earlier one
_NO_PREFIX = b"\x1a\x02\x18\x00"


def vocabulary_from_spm(path: Path, config: FolderConfig) -> Vocabulary:
    """ValueError names a file that isn't a sentencepiece model."""
    data = path.read_bytes()
    try:
        model = SentencePieceProcessor(model_proto=data)
        inner = model if config.legacy else SentencePieceProcessor(model_proto=data + _NO_PREFIX)
    except RuntimeError as error:
        raise ValueError(f"{path} can't be read as a sentencepiece model: {error}") from error
    size = model.get_piece_size()
    control = [i for i in range(size) if model.is_control(i) or model.is_unknown(i)]
    own = {i: AddedToken(model.id_to_piece(i), special=True) for i in control}
    tokens = {**own, **config.added}
    ids = {token.content: i for i, token in tokens.items()}
    pieces = {model.id_to_piece(i): i for i in range(size)}

    def id_of(token: str | None, default: int) -> int | None:
        if token is None:
            return default if default >= 0 else None
        return ids.get(token, pieces.get(token))

    return Vocabulary(
        size=max(size, 1 + max(tokens, default=-1)),
        encode=_Splitter(model, inner, _pattern(tokens.values()), ids).encode,
        piece=lambda i: model.id_to_piece(i) if i < size else None,
        find=pieces.get,
        pieces=SpacePieces(
            byte_fallback=any(model.is_byte(i) for i in range(size)),
            strips_space=model.encode("a", out_type=str)[0].startswith(SPACE_MARK),
        ),
        added={i: token.content for i, token in tokens.items()},
        special_ids=frozenset(i for i, token in tokens.items() if token.special),
        bos_id=id_of(config.bos, model.bos_id()),
        eos_id=id_of(config.eos, model.eos_id()),
        add_bos=config.add_bos is not False,
        chat_template=config.chat_template,
    )


@dataclass(frozen=True, slots=True)
class _Splitter:
    """`first` reads text at the very beginning, `inner` text after an added token."""

    first: SentencePieceProcessor
    inner: SentencePieceProcessor
    pattern: re.Pattern[str]
    ids: dict[str, int]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self.pattern.finditer(text):
            ids += self._plain(text, start, match.start())
            found = match.group()
            ids.append(self.ids[found if found in self.ids else found.strip()])
            start = match.end()
        return ids + self._plain(text, start, len(text))

    def _plain(self, text: str, start: int, end: int) -> list[int]:
        model = self.inner if start else self.first
        return model.encode(text[start:end]) if start < end else []


def _pattern(tokens: Iterable[AddedToken]) -> re.Pattern[str]:
    """Any added token, the longest first, with the blanks around it that some of them swallow."""
    longest = sorted(tokens, key=lambda token: len(token.content), reverse=True)
    return re.compile(
        "|".join(
            (r"\s*" if token.lstrip else "")
            + re.escape(token.content)
            + (r"\s*" if token.rstrip else "")
            for token in longest
        )
        or "(?!)"  # no token at all: matches nowhere
    )
