"""The vocabulary in a tokenizer.json, through the `tokenizers` package.

Its decoder is a little program. It is read only to learn how pieces spell bytes, so one that does
more than that is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.model.vocab_folder import FolderConfig
from engine.model.vocabulary import SPACE_MARK, ByteLevelPieces, Pieces, SpacePieces, Vocabulary


def vocabulary_from_json(path: Path, config: FolderConfig) -> Vocabulary:
    """ValueError names the file and what is wrong with it."""
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # what the Rust side raises has no better type
        raise ValueError(f"{path} can't be read as a tokenizer: {error}") from error
    pieces = _pieces(path, backend)
    backend.no_truncation()
    backend.no_padding()
    _add_missing(path, backend, config)
    added = backend.get_added_tokens_decoder()
    in_front = _put_in_front(backend)
    bos_id = _id_of(backend, config.bos)
    bos_id = in_front if bos_id is None else bos_id
    return Vocabulary(
        size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        piece=backend.id_to_token,
        find=backend.token_to_id,
        pieces=pieces,
        added={i: token.content for i, token in added.items()},
        special_ids=frozenset(i for i, token in {**added, **config.added}.items() if token.special),
        bos_id=bos_id,
        eos_id=_id_of(backend, config.eos),
        add_bos=bos_id == in_front if config.add_bos is None else config.add_bos,
        chat_template=config.chat_template,
    )


def _id_of(backend: Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _put_in_front(backend: Tokenizer) -> int | None:
    """The special token that the file's post-processor begins every prompt with."""
    encoding = backend.encode("a")
    return encoding.ids[0] if encoding.special_tokens_mask[:1] == [1] else None


def _add_missing(path: Path, backend: Tokenizer, config: FolderConfig) -> None:
    """Tokens that only tokenizer_config.json calls added get the ids that it gives them."""
    known = backend.get_added_tokens_decoder()
    for i, token in config.added.items():
        if i not in known:
            backend.add_tokens([token])
        if (found := backend.id_to_token(i)) != token.content:
            raise ValueError(
                f"{path}: token {i} is {found!r}, but the files beside it say {token.content!r}"
            )


# sentencepiece's decoder, in this order; all but the first are optional
_SPACE_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip")


def _pieces(path: Path, backend: Tokenizer) -> Pieces:
    steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
    kinds = tuple(step["type"] for step in steps)
    if kinds == ("ByteLevel",):
        return ByteLevelPieces()
    if kinds == ("Metaspace",) and steps[0]["replacement"] == SPACE_MARK:
        return SpacePieces(byte_fallback=False, strips_space=steps[0]["prepend_scheme"] != "never")
    ordered = kinds == tuple(kind for kind in _SPACE_STEPS if kind in kinds)
    if ordered and "Replace" in kinds and all(map(_as_sentencepiece, steps)):
        return SpacePieces(byte_fallback="ByteFallback" in kinds, strips_space="Strip" in kinds)
    raise ValueError(
        f"{path}: its decoder ({', '.join(kinds) or 'none'}) isn't supported; supported are "
        f"ByteLevel, Metaspace, and sentencepiece's {', '.join(_SPACE_STEPS)}"
    )


def _steps(decoder: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sequences in sequences, laid flat."""
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [dict(decoder)]


def _as_sentencepiece(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": SPACE_MARK} and step["content"] == " ")
    if step["type"] == "Strip":
        return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
    return True
