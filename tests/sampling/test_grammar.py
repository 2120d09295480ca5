"""Matchers: masks against what is accepted, ends, forks and rewinds, and the limits of masks."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

import pytest

from engine.request import Grammar, GrammarError
from engine.sampling.grammar import GrammarCompiler, GrammarMatcher


@dataclass
class Bytes:
    """A token a byte, a few longer ones, holes, and special tokens at the end."""

    bos_id: int | None = None

    def __post_init__(self) -> None:
        self.tokens = [bytes((i,)) for i in range(256)]
        self.tokens += [b"true", b'{"', b'": ', b"", b"", b"<eos>", b"<end>"]
        self.vocab_size = len(self.tokens)
        self.special_ids = frozenset((261, 262))

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode())


VOCABULARY = Bytes()
ENDS = (261, 262)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 3}},
    "required": ["a"],
    "additionalProperties": False,
}


class Spaced(Bytes):
    """Puts a space in front of every text, as sentencepiece does."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list((" " + text).encode())


class Wrong(Bytes):
    """Spells nothing as it is."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [7]


def matcher(
    schema: object = SCHEMA, ends: tuple[int, ...] = ENDS, vocabulary: Bytes = VOCABULARY
) -> GrammarMatcher:
    return GrammarCompiler(vocabulary, ends).matcher(Grammar("json_schema", json.dumps(schema)))


def ids_of(mask: bytes) -> set[int]:
    number = int.from_bytes(mask, "little")
    return {i for i in range(8 * len(mask)) if number >> i & 1}


@pytest.mark.parametrize("kind", [Bytes, Spaced, Wrong])
@pytest.mark.parametrize("seed", range(5))
def test_what_the_mask_allows_is_accepted(seed: int, kind: type[Bytes]) -> None:
    """And all that is accepted begins like something that is allowed: where the text is forced,
    only its usual spelling is."""
    rng, made = random.Random(seed), matcher(vocabulary=kind())
    taken: list[int] = []
    while not made.done and len(taken) < 60:
        allowed = ids_of(made.mask())
        accepted = {i for i in range(VOCABULARY.vocab_size) if made.fork().accept(i)}
        assert allowed <= accepted, (taken, allowed - accepted)
        assert {VOCABULARY.tokens[i][:1] for i in accepted} == {
            VOCABULARY.tokens[i][:1] for i in allowed
        }
        token = rng.choice(sorted(allowed - set(ENDS)) or sorted(allowed))
        if rng.random() < 0.2 and taken:
            count = rng.randint(1, len(taken))
            made.rewind(count)
            del taken[-count:]
            fresh = matcher(vocabulary=kind())
            assert all(map(fresh.accept, taken))
            assert made.mask() == fresh.mask()
            continue
        assert made.accept(token)
        taken.append(token)
    assert made.done
    text = b"".join(VOCABULARY.tokens[token] for token in taken)
    assert json.loads(text)["a"] in (True, False)
    assert text.decode() == json.dumps(json.loads(text), ensure_ascii=False) or b"\\" in text


def test_all_ends_are_allowed_where_it_may_end() -> None:
    made = matcher({"type": "integer", "minimum": 0, "maximum": 30})
    assert not ids_of(made.mask()) & set(ENDS)
    assert made.accept(ord("3"))
    assert not made.done
    assert ids_of(made.mask()) == {ord("0"), *ENDS}


def test_a_vocabulary_without_an_end() -> None:
    made = matcher({"type": "boolean"}, ends=())
    assert made.accept(256)
    assert made.done
    assert not ids_of(made.mask()) & set(range(VOCABULARY.vocab_size))


def test_a_refused_token_changes_nothing() -> None:
    made = matcher()
    before = made.mask()
    assert not made.accept(ord("x"))
    assert made.mask() == before


def test_a_limit_that_is_met_is_an_error() -> None:
    """Never an end of the answer, though llguidance calls such a matcher stopped."""

    class Exhausted:
        def compute_bitmask(self) -> bytes:
            return bytes(40)

        def try_consume_tokens(self, tokens: list[int]) -> int:
            return 0

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "step limit exceeded\nand much more"

    made = GrammarMatcher(Exhausted())  # type: ignore[arg-type]
    for use in (made.mask, lambda: made.accept(1)):
        with pytest.raises(GrammarError, match=r"^grammar: step limit exceeded$"):
            use()
