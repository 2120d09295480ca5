"""Sentencepiece vocabularies, in GGUF metadata and in folders, against sentencepiece itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from engine.model.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from tests.model.test_tokenizer import CORPUS, TEXT, write


@pytest.fixture(scope="module")
def spm_bytes() -> bytes:
    out = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.split("\n")] * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=400,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def spm(spm_bytes: bytes) -> SentencePieceProcessor:
    return SentencePieceProcessor(model_proto=spm_bytes)


@pytest.fixture(scope="module")
def spm_metadata(spm: SentencePieceProcessor) -> dict[str, Any]:
    ids = range(spm.get_piece_size())
    types = [
        2 if spm.is_unknown(i) else 3 if spm.is_control(i) else 6 if spm.is_byte(i) else 1
        for i in ids
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": types,
    }


@pytest.fixture
def spm_folder(spm_bytes: bytes, tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(spm_bytes)
    return tmp_path


@pytest.fixture(scope="module")
def from_spm_gguf(spm_metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(spm_metadata)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_spm_in_gguf_equals_sentencepiece(
    spm: SentencePieceProcessor, from_spm_gguf: Tokenizer, text: str
) -> None:
    ids = from_spm_gguf.encode(text, add_special=False)
    assert ids == spm.encode(text)
    assert from_spm_gguf.decode(ids) == text.replace("\u2581", " ")  # it can't tell them apart


def test_spm_in_gguf_facts(spm: SentencePieceProcessor, from_spm_gguf: Tokenizer) -> None:
    assert (from_spm_gguf.bos_id, from_spm_gguf.eos_id, from_spm_gguf.add_bos) == (1, 2, True)
    assert from_spm_gguf.special_ids == {0, 1, 2}
    for text in CORPUS:
        assert from_spm_gguf.encode(text) == [1, *spm.encode(text)]


def test_spm_in_gguf_token_types(spm_metadata: dict[str, Any]) -> None:
    """An unused token is never made from text, a user-defined one always."""
    types = list(spm_metadata["tokenizer.ggml.token_type"])
    the, dog = (spm_metadata["tokenizer.ggml.tokens"].index(f"\u2581{w}") for w in ("the", "dog"))
    types[the] = 5
    tokens = list(spm_metadata["tokenizer.ggml.tokens"])
    tokens[dog], types[dog] = "<dog>", 4
    changed = {"tokenizer.ggml.token_type": types, "tokenizer.ggml.tokens": tokens}
    tokenizer = tokenizer_from_gguf({**spm_metadata, **changed})
    ids = tokenizer.encode("the <dog>")
    assert the not in ids
    assert ids[-1] == dog
    assert tokenizer.decode(ids) == "the <dog>"


def test_spm_in_gguf_without_space_prefix(spm_metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf({**spm_metadata, "tokenizer.ggml.add_space_prefix": False})
    ids = tokenizer.encode("the dog", add_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"the dog"
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_spm_in_gguf_needs_scores(spm_metadata: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scores has 1 entries"):
        tokenizer_from_gguf({**spm_metadata, "tokenizer.ggml.scores": [0.0]})


def test_spm_folder_equals_sentencepiece(spm: SentencePieceProcessor, spm_folder: Path) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    for text in [*CORPUS, "", " a", "  two  spaces", "\u4f60\U0001f680"]:
        assert tokenizer.encode(text) == [1, *spm.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(spm.piece_to_id("<0xAB>")) == b"\xab"
    assert tokenizer.token_bytes(spm.piece_to_id("\u2581the")) == b" the"
    assert tokenizer.token_id("\n") == spm.piece_to_id("<0x0A>")
    assert tokenizer.token_id("<s>") == 1


def test_spm_folder_agrees_with_gguf(spm_folder: Path, from_spm_gguf: Tokenizer) -> None:
    folder, gguf = tokenizer_from_folder(spm_folder), from_spm_gguf
    for text in ("<s>the dog</s> the", "</s>", "a <s> b"):
        assert folder.encode(text) == gguf.encode(text)
    for i in range(gguf.vocab_size):
        assert folder.token_bytes(i) == gguf.token_bytes(i)


def test_spm_added_tokens(spm: SentencePieceProcessor, spm_folder: Path) -> None:
    size = spm.get_piece_size()
    token = {"content": "<think>", "special": False, "rstrip": True}
    write(
        spm_folder,
        "tokenizer_config.json",
        {"added_tokens_decoder": {str(size): token}, "legacy": False, "add_bos_token": False},
    )
    tokenizer = tokenizer_from_folder(spm_folder)
    assert tokenizer.vocab_size == size + 1
    ids = tokenizer.encode("the<think> \nthe")
    first, after = ids.index(size), ids[ids.index(size) + 1 :]
    assert ids[:first] == spm.encode("the")
    # no space in front of what follows: it isn't the text's beginning
    assert b"".join(map(tokenizer.token_bytes, after)) == b"the"
    assert tokenizer.decode(ids) == "the<think>the"


def test_leading_space_of_a_continuation(spm_folder: Path, spm: SentencePieceProcessor) -> None:
    tokenizer = tokenizer_from_folder(spm_folder)
    token = spm.piece_to_id("\u2581the")
    assert tokenizer.detokenizer().push(token) == "the"
    assert tokenizer.detokenizer(continues=True).push(token) == " the"


def test_llama_style_tokenizer_json(spm: SentencePieceProcessor, tmp_path: Path) -> None:
    """The sequence that Hugging Face writes for Llama 2: read for its bytes, not run."""
    vocab = {spm.id_to_piece(i): i for i in range(spm.get_piece_size())}
    made = Backend(BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(tmp_path)
    for text in ("<s> the dog \U0001f680", "two  spaces", " the"):
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special=skip) == made.decode(
                ids, skip_special_tokens=skip
            )
    made.decoder = decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_from_folder(tmp_path).decode([vocab["\u2581the"]] * 2) == "the the"
