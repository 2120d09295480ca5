"""The pair's tokenizer and chat template: bytes, few merges, and the markers of Qwen3's chat."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bench.abacus.problems import LETTERS, Problem

END = "<|im_end|>"
MARKERS = ("<|endoftext|>", "<|im_start|>", END)
THINKING = ("<think>", "</think>")

TEMPLATE = (
    "{%- for message in messages %}"
    "{%- set content = message['content'] %}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)
"""As Qwen3's, without tools: earlier turns lose their thinking."""


def build() -> Tokenizer:
    """Byte-level BPE with few merges: a blank line, and every name with its equals sign and with
    its colon, so that values and statements each follow the one token that recalls them."""
    newline = "\u010a"  # in the alphabet of bytes
    merges = [(newline, newline), *((name, sign) for sign in "=:" for name in LETTERS)]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in MARKERS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in THINKING])
    return tokenizer


class Example(NamedTuple):
    """A training sequence: tokens, and which of them the model learns to write."""

    tokens: list[int]
    learned: list[bool]


def example(tokenizer: Tokenizer, problem: Problem) -> Example:
    """Prompt, chain and answer as the chat template lays them out."""
    prompt = f"<|im_start|>user\n{problem.question}{END}\n<|im_start|>assistant\n"
    tokens = tokenizer.encode(prompt).ids
    learned = [False] * len(tokens)

    def add(text: str, learn: bool) -> None:
        ids = tokenizer.encode(text).ids
        tokens.extend(ids)
        learned.extend([learn] * len(ids))

    add("<think>\n", True)
    for index, thought in enumerate(problem.thoughts):
        if index:
            add("\n\n", True)
        for piece in thought:
            add(piece.text, piece.learned)
    add(f"\n</think>\n\n{problem.answer}{END}", True)
    return Example(tokens, learned)
