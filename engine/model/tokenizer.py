"""Text to tokens and back, the same for every kind of vocabulary file.

Whole and streaming decoding are one path (`Detokenizer`), so they always agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.model.detokenizer import Detokenizer
from engine.model.vocab_folder import read_folder_config
from engine.model.vocab_gguf import vocabulary_from_gguf
from engine.model.vocab_json import vocabulary_from_json
from engine.model.vocab_spm import vocabulary_from_spm
from engine.model.vocabulary import Vocabulary

NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """Of a Hugging Face folder: tokenizer.json, else sentencepiece's tokenizer.model.

    ValueError: neither is there, one can't be read, or it decodes in a way that isn't supported.
    """
    config = read_folder_config(folder)
    if (path := folder / "tokenizer.json").is_file():
        return Tokenizer(vocabulary_from_json(path, config))
    if (path := folder / "tokenizer.model").is_file():
        return Tokenizer(vocabulary_from_spm(path, config))
    raise ValueError(f"{folder} has neither tokenizer.json nor tokenizer.model")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Of a GGUF file's metadata (`tokenizer.ggml.*`), as plain Python values."""
    return Tokenizer(vocabulary_from_gguf(metadata))


class Tokenizer:
    """A vocabulary with what callers need around it. Safe to share between threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._bytes: dict[int, bytes] = {}  # filled as ids are met: start-up stays fast
        self._added_ids = {content: i for i, content in vocabulary.added.items()}
        self.vocab_size = vocabulary.size
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.add_bos = vocabulary.add_bos and vocabulary.bos_id is not None
        self.special_ids = vocabulary.special_ids
        self.chat_template = vocabulary.chat_template

    def padded_to(self, vocab_size: int) -> Tokenizer:
        """For a model whose embedding has more rows than tokens: the rest stand for nothing."""
        return Tokenizer(replace(self._vocabulary, size=max(vocab_size, self.vocab_size)))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give every id the same bytes and the same role in text."""
        digest = hashlib.sha256(repr(sorted(self.special_ids)).encode())
        for token_id in range(self.vocab_size):
            data = self.token_bytes(token_id)
            digest.update(len(data).to_bytes(4, "little") + data)
        return digest.hexdigest()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a prompt, with BOS in front where the model wants it and `add_special`.

        Special tokens spelled out in `text` become those tokens, as in Hugging Face's tokenizers.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the prompt holds a lone surrogate ({text[error.start]!r} at character "
                f"{error.start}), which is no text; remove it or decode its source correctly"
            ) from error
        ids = self._vocabulary.encode(text)
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; U+FFFD for bytes that are no UTF-8. ValueError: an unknown id."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True, continues: bool = False) -> Detokenizer:
        """Fresh. `continues`: its text follows other text, so a leading space is a space."""
        return Detokenizer(
            self.token_bytes,
            self.special_ids if skip_special else (),
            strip_space=self._vocabulary.pieces.strips_space and not continues,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly what a token stands for, a special one for its content."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} isn't in 0..{self.vocab_size - 1}")
        content = self._vocabulary.added.get(token_id)
        if content is not None:
            return content.encode()
        piece = self._vocabulary.piece(token_id)
        return b"" if piece is None else self._vocabulary.pieces.to_bytes(piece)

    def token_id(self, text: str) -> int | None:
        """The id of the one token that stands for exactly this text, if there is one."""
        if text in self._added_ids:
            return self._added_ids[text]
        data = text.encode()
        spellings = [self._vocabulary.pieces.to_piece(text)]
        if len(data) == 1:
            spellings.append(f"<0x{data[0]:02X}>")
        for found in map(self._vocabulary.find, spellings):
            if found is not None and self.token_bytes(found) == data:
                return found
        return None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """The prompt of a conversation; encode it with add_special=False.

        `template` replaces the model's own. ValueError: no template, bad messages, or the
        template's own error.
        """
        template = template if template is not None else self.chat_template
        if template is None:
            raise ValueError(
                "the model has no chat template: give one, or a plain prompt instead of messages"
            )
        from engine.model import template as chat  # jinja2 takes a tenth of a second to import

        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        specials = {n: self.token_bytes(i).decode() for n, i in named.items() if i is not None}
        return chat.render(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**specials, **variables},
        )
