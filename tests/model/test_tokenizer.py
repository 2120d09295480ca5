"""Every kind of vocabulary file against the library that defines it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.model.pretokenizers import KINDS
from engine.model.tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf
from engine.model.vocabulary import ByteLevelPieces

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind it at all.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)",
    "In 2024 there were 12345 tokens; caf\u00e9, na\u00efve, \u4f60\u597d\u4e16\u754c \U0001f600.",
    "<think>\nLet me think about the question again.\n</think>\n\nThe answer is 42.",
]
SPECIAL = ["<|end|>", "<|user|>"]
TEXT = st.text(st.one_of(st.sampled_from("theoanfibr 12\n.'<"), st.characters(codec="utf-8")))
MANY = settings(max_examples=60, deadline=None)


# byte-level BPE: the same small vocabulary as tokenizer.json and as GGUF metadata


@pytest.fixture(scope="module")
def backend() -> Backend:
    """Specials 0 and 1, 256 bytes, merges, and </think> as a visible added token at the end."""
    made = Backend(BPE())
    made.pre_tokenizer = KINDS["smollm"].pre_tokenizer()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    made.add_tokens([AddedToken("</think>", normalized=False)])
    return made


@pytest.fixture(scope="module")
def metadata(backend: Backend) -> dict[str, Any]:
    spec = json.loads(backend.to_str())
    size = backend.get_vocab_size()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [backend.id_to_token(i) for i in range(size)],
        "tokenizer.ggml.token_type": [3, 3] + [1] * (size - 3) + [4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    }


@pytest.fixture(scope="module")
def from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata)


@pytest.fixture
def folder(backend: Backend, tmp_path: Path) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


@MANY
@given(text=TEXT)
def test_gguf_equals_the_tokenizer_it_came_from(
    backend: Backend, from_gguf: Tokenizer, text: str
) -> None:
    text = f"{text}<|user|>{text}</think>"
    ids = from_gguf.encode(text)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert from_gguf.decode(ids) == backend.decode(ids)
    assert from_gguf.decode(ids, skip_special=False) == text
    assert b"".join(map(from_gguf.token_bytes, ids)) == text.encode()


@MANY
@given(ids=st.lists(st.integers(0, 300)))
def test_random_ids_stream_as_they_decode(from_gguf: Tokenizer, ids: list[int]) -> None:
    detokenizer = from_gguf.detokenizer(skip_special=False)
    streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert streamed == b"".join(map(from_gguf.token_bytes, ids)).decode("utf-8", "replace")
    assert streamed == from_gguf.decode(ids, skip_special=False)


def test_gguf_facts(from_gguf: Tokenizer, backend: Backend) -> None:
    assert from_gguf.vocab_size == backend.get_vocab_size()
    assert (from_gguf.bos_id, from_gguf.eos_id, from_gguf.add_bos) == (1, 0, False)
    assert from_gguf.special_ids == {0, 1}
    assert from_gguf.token_id("</think>") == from_gguf.vocab_size - 1
    padded = from_gguf.padded_to(from_gguf.vocab_size + 4)  # as many rows has the embedding
    assert [padded.token_bytes(i) for i in range(from_gguf.vocab_size, padded.vocab_size)] == [
        b""
    ] * 4
    assert from_gguf.token_id(" the") == backend.token_to_id("\u0120the")
    assert from_gguf.token_id("no such token") is None
    assert from_gguf.encode("") == []
    assert from_gguf.decode([]) == ""
    assert from_gguf.apply_chat_template([{"role": "user", "content": "Hi"}]) == "<|user|>Hi<|end|>"


def test_bos_where_the_model_wants_it(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": True})
    plain = tokenizer.encode("the", add_special=False)
    assert tokenizer.encode("the") == [1, *plain]
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "llama-bpe"}).add_bos


def test_bad_ids_and_bad_text(from_gguf: Tokenizer) -> None:
    for bad in (-1, from_gguf.vocab_size):
        with pytest.raises(ValueError, match=str(bad)):
            from_gguf.decode([2, bad])
    with pytest.raises(ValueError, match=r"prompt holds a lone surrogate .* at character 2"):
        from_gguf.encode("ab\ud800")


def test_no_template_says_what_to_do(metadata: dict[str, Any]) -> None:
    bare = {key: value for key, value in metadata.items() if key != "tokenizer.chat_template"}
    tokenizer = tokenizer_from_gguf(bare)
    with pytest.raises(ValueError, match=r"no chat template.*plain prompt"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    given_one = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], template="{{ messages[0].content }}!"
    )
    assert given_one == "Hi!"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model", "bert", "'bert'; supported are 'gpt2', 'llama'"),
        ("pre", "martian", "'martian'.*known are default.*qwen2"),
        ("tokens", None, "tokens is missing"),
        ("merges", None, "merges is missing"),
        ("merges", ["not there"], "merges don't fit"),
        ("token_type", [1], "token_type has 1 entries"),
        ("eos_token_id", 4000, "eos_token_id is 4000, but there are"),
    ],
)
def test_bad_metadata_is_named(metadata: dict[str, Any], key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokenizer_from_gguf({**metadata, f"tokenizer.ggml.{key}": value})


def test_an_unnamed_pre_tokenizer_is_told(
    metadata: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bare = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.pre"}
    default = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    assert [tokenizer_from_gguf(bare).encode(t) for t in CORPUS] == [
        default.encode(t) for t in CORPUS
    ]
    assert "pre-tokenizer" in caplog.text


WORDS = {
    "gpt-2": "I|'m| 2024| DON|'|T|  |\t|go|.|\n\n| x|!!|\n",
    "smollm": "I|'m| |2|0|2|4| DON|'|T|  |\t|go|.|\n\n| x|!!|\n",
    "qwen2": "I|'m| |2|0|2|4| DON|'T|  |\tgo|.\n\n| x|!!\n",
    "llama-bpe": "I|'m| |202|4| DON|'T|  |\tgo|.\n\n| x|!!\n",
    "tekken": "I|'m| |2|0|2|4| DON|'T|  |\tgo|.\n\n| x|!!\n",
    "deepseek-v3": "I|'m| |202|4| DON|'T|  |\tgo|.\n\n| x|!!\n",
    "deepseek-coder": "I|'|m| |2|0|2|4| DON|'|T|  |\tgo|.|\n|\n| x|!!|\n",
}


@pytest.mark.parametrize("kind", WORDS)
def test_how_kinds_cut(kind: str) -> None:
    spell = ByteLevelPieces()
    text = "I'm 2024 DON'T  \tgo.\n\n x!!\n"
    words = KINDS[kind].pre_tokenizer().pre_tokenize_str(text)
    assert "|".join(spell.to_bytes(word).decode() for word, _ in words) == WORDS[kind]


def test_qwen_composes_characters(metadata: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"})
    assert tokenizer.decode(tokenizer.encode("cafe\u0301")) == "caf\u00e9"


def test_ignored_merges_take_whole_words(metadata: dict[str, Any]) -> None:
    """Without its last merge a word is still a token, and Llama 3 takes it at once."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [m for m in metadata["tokenizer.ggml.merges"] if m.replace(" ", "") != "\u0120the"]
    cut = {**metadata, "tokenizer.ggml.merges": merges}
    whole = tokens.index("\u0120the")
    llama = tokenizer_from_gguf({**cut, "tokenizer.ggml.pre": "llama-bpe"})
    assert llama.encode(" the", add_special=False) == [whole]
    assert len(tokenizer_from_gguf(cut).encode(" the")) > 1


# folders with a tokenizer.json


def test_folder_equals_gguf(folder: Path, from_gguf: Tokenizer) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": "<|user|>", "eos_token": "<|end|>"})
    tokenizer = tokenizer_from_folder(folder)
    for text in [*CORPUS, "", "<|user|> a</think>"]:
        assert tokenizer.encode(text) == from_gguf.encode(text)
    for i in range(from_gguf.vocab_size):
        assert tokenizer.token_bytes(i) == from_gguf.token_bytes(i)
    assert tokenizer.special_ids == {0, 1}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 0, False)
    assert tokenizer.vocab_size == from_gguf.vocab_size


def test_added_tokens_stand_for_themselves(folder: Path) -> None:
    """Even where every letter is in the byte alphabet (U+00E9 would be byte E9)."""
    size = tokenizer_from_folder(folder).vocab_size
    token = {"content": "<\u00e9>", "special": False, "normalized": False}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {str(size): token}})
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.encode("<\u00e9>") == [size]
    assert tokenizer.token_bytes(size) == "<\u00e9>".encode()
    assert tokenizer.token_id("<\u00e9>") == size


def test_a_known_piece_that_the_config_calls_added(folder: Path) -> None:
    """It is split out of words from then on."""
    letter = tokenizer_from_folder(folder).token_id("e")
    assert letter not in tokenizer_from_folder(folder).encode(" the")
    write(
        folder, "tokenizer_config.json", {"added_tokens_decoder": {f"{letter}": {"content": "e"}}}
    )
    assert letter in tokenizer_from_folder(folder).encode(" the")


def test_added_token_that_contradicts_the_file(folder: Path) -> None:
    token = {"content": "<other>", "special": True}
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"5": token}})
    with pytest.raises(ValueError, match=r"token 5 is .*<other>"):
        tokenizer_from_folder(folder)


def test_bos_by_post_processor_and_by_config(folder: Path, backend: Backend) -> None:
    made = Backend.from_str(backend.to_str())
    made.post_processor = processors.TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", 1)]
    )
    made.enable_truncation(3)  # what training left behind must not cut a prompt
    made.save(str(folder / "tokenizer.json"))
    tokenizer = tokenizer_from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.encode("the quick brown fox") == made.encode("the quick brown fox").ids[:1] + (
        backend.encode("the quick brown fox", add_special_tokens=False).ids
    )
    write(folder, "tokenizer_config.json", {"add_bos_token": False})
    assert not tokenizer_from_folder(folder).add_bos
    made.post_processor = processors.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"add_bos_token": True, "bos_token": "<|user|>"})
    assert tokenizer_from_folder(folder).add_bos


def test_templates_of_a_folder(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for config, template in ((None, None), ("plain", "plain"), (named, "d")):
        write(folder, "tokenizer_config.json", {"chat_template": config})
        assert tokenizer_from_folder(folder).chat_template == template
    (folder / "chat_template.jinja").write_text("own file")
    assert tokenizer_from_folder(folder).chat_template == "own file"


def test_bos_from_the_special_tokens_map(folder: Path) -> None:
    write(folder, "special_tokens_map.json", {"bos_token": {"content": "<|user|>"}})
    assert tokenizer_from_folder(folder).bos_id == 1


def test_broken_folders_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json can't be read"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json can't be read"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="neither"):
        tokenizer_from_folder(folder)
    (folder / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"tokenizer\.model can't be read"):
        tokenizer_from_folder(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Replace("\u2581", " ")]),
    ],
)
def test_other_decoders_are_refused(folder: Path, backend: Backend, decoder: Any) -> None:
    spec = json.loads(backend.to_str())
    spec["decoder"] = None if decoder is None else json.loads(decoder.__getstate__())
    write(folder, "tokenizer.json", spec)
    with pytest.raises(ValueError, match="isn't supported; supported are ByteLevel"):
        tokenizer_from_folder(folder)
