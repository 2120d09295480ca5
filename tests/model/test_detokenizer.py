"""Streaming text equals text decoded at once, whatever the tokens' bytes are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.model.detokenizer import Detokenizer

# bytes that start, continue and break UTF-8 sequences of every length
HARD_BYTES = st.sampled_from(
    b"a \x80\xbf\xc0\xc3\xa9\xe2\x82\xac\xed\xa0\xf0\x9f\x98\x80\xf4\x90\xff"
)
TOKENS = st.lists(st.one_of(st.lists(HARD_BYTES, max_size=6).map(bytes), st.text().map(str.encode)))


def stream(tokens: list[bytes], skipped: set[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokens.__getitem__, skipped or ())
    return [*map(detokenizer.push, range(len(tokens))), detokenizer.finish()]


@given(TOKENS)
def test_stream_equals_whole(tokens: list[bytes]) -> None:
    assert "".join(stream(tokens)) == b"".join(tokens).decode("utf-8", "replace")


@given(st.text(min_size=1))
def test_valid_text_is_never_broken(text: str) -> None:
    pieces = stream([bytes([byte]) for byte in text.encode()])
    assert "".join(pieces) == text
    # every character arrives whole, with its last byte
    sizes = [len(char.encode()) for char in text]
    ends = [sum(sizes[: i + 1]) - 1 for i in range(len(sizes))]
    assert [i for i, piece in enumerate(pieces) if piece] == ends


def test_emoji_waits_for_its_last_byte() -> None:
    assert stream([b"ok \xf0", b"\x9f\x98", b"\x80!"]) == ["ok ", "", "\U0001f600!", ""]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    assert stream([b"ok ", b"\xf0\x9f"]) == ["ok ", "", "\ufffd"]


def test_skipped_tokens_give_no_text() -> None:
    assert stream([b"<s>", b"a", b"</s>"], {0, 2}) == ["", "a", "", ""]


def test_only_the_first_space_is_stripped() -> None:
    tokens = [b"<s>", b"", b"  a", b" b"]
    detokenizer = Detokenizer(tokens.__getitem__, {0}, strip_space=True)
    assert [*map(detokenizer.push, range(4)), detokenizer.finish()] == ["", "", " a", " b", ""]


def test_a_space_after_text_stays() -> None:
    tokens = [b"a", b" "]
    detokenizer = Detokenizer(tokens.__getitem__, strip_space=True)
    assert detokenizer.push(0) + detokenizer.push(1) == "a "
