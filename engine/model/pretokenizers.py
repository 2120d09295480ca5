"""How each kind of byte-level vocabulary cuts text into words before merging.

A GGUF file names the kind and nothing more. Each entry is what that model's own tokenizer.json
does (for digits and normal forms too), not an approximation of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizerKind:
    """`patterns` are applied one after the other, each to the pieces that the last one left.

    No patterns: GPT-2's own. `ignore_merges`: a word that is a token is never merged up to it.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False  # every digit is a word
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # unless the file says otherwise

    def normalizer(self) -> Normalizer | None:
        return NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        parts: list[PreTokenizer] = [Split(Regex(p), "isolated") for p in self.patterns]
        if self.digits:
            parts.append(Digits(individual_digits=True))
        parts.append(ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return Sequence(parts)


# cl100k's alternatives, from which Llama 3 and Qwen differ only in how many digits make a word
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = PreTokenizerKind()
_STARCODER = PreTokenizerKind(digits=True)
_QWEN2 = PreTokenizerKind(patterns=(_CL100K.format(digits=r"\p{N}"),), nfc=True)
_LLAMA3 = PreTokenizerKind(
    patterns=(_CL100K.format(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True
)

KINDS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,
    "command-r": PreTokenizerKind(digits=True, nfc=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": PreTokenizerKind(patterns=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-coder": PreTokenizerKind(
        patterns=(
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        ),
        digits=True,
    ),
    "deepseek-v3": PreTokenizerKind(
        patterns=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
    ),
}
