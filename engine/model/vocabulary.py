"""A vocabulary as the tokenizer sees it, whatever file it came from.

A piece is a vocabulary's spelling of a token ("\\u0120the", "\\u2581the", "<0x0A>"); what it stands
for are bytes, and those are exact: stop strings and thought boundaries are searched in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

SPACE_MARK = "\u2581"  # how sentencepiece spells a space


class Pieces(Protocol):
    """How pieces spell bytes."""

    @property
    def strips_space(self) -> bool:
        """Whether decoded text loses one leading space, the one that encoding put there."""

    def to_bytes(self, piece: str) -> bytes:
        """What the piece stands for."""

    def to_piece(self, text: str) -> str:
        """The piece that would stand for exactly this text."""


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet: visible Latin-1 bytes are themselves, the others follow U+0100 in order."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(0x100 + rank) for rank, byte in enumerate(hidden)
    }


_TO_LETTER = _byte_alphabet()
_TO_BYTE = {letter: byte for byte, letter in _TO_LETTER.items()}


@dataclass(frozen=True, slots=True)
class ByteLevelPieces:
    """GPT-2's way: one letter a byte. A piece with any other letter stands for itself."""

    strips_space: bool = False

    def to_bytes(self, piece: str) -> bytes:
        try:
            return bytes([_TO_BYTE[letter] for letter in piece])
        except KeyError:
            return piece.encode()

    def to_piece(self, text: str) -> str:
        return "".join(_TO_LETTER[byte] for byte in text.encode())


_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class SpacePieces:
    """Sentencepiece's way: plain text with marked spaces and, for rare bytes, "<0xAB>"."""

    byte_fallback: bool
    strips_space: bool

    def to_bytes(self, piece: str) -> bytes:
        if self.byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        return piece.replace(SPACE_MARK, " ").encode()

    def to_piece(self, text: str) -> str:
        return text.replace(" ", SPACE_MARK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything that a tokenizer file says.

    `encode` parses added tokens inside the text and puts nothing in front of it. Added tokens
    stand for their own content; special ones among all tokens are left out of text.
    """

    size: int
    encode: Callable[[str], list[int]]
    piece: Callable[[int], str | None]  # None: a hole in the numbering
    find: Callable[[str], int | None]  # the id of a piece
    pieces: Pieces
    added: Mapping[int, str]
    special_ids: frozenset[int]
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False  # where there is one
    chat_template: str | None = None
