"""Log-probabilities as clients read them: tokens as text and bytes, every number finite."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from engine.model.tokenizer import Tokenizer
from engine.request import TokenLogprob
from engine.server.shapes import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)


class Spelling(NamedTuple):
    """A token's bytes, and the text that they are; U+FFFD for half a character."""

    text: str
    data: list[int]


def spell(tokenizer: Tokenizer, token: int) -> Spelling:
    data = tokenizer.token_bytes(token)
    return Spelling(data.decode(errors="replace"), list(data))


def chat_logprobs(tokenizer: Tokenizer, known: Seq[TokenLogprob]) -> ChatLogprobs:
    def one(token: int, logprob: float) -> TopLogprob:
        text, data = spell(tokenizer, token)
        return {"token": text, "logprob": logprob, "bytes": data}

    content: list[ChatLogprob] = [
        {**one(each.token_id, each.logprob), "top_logprobs": [one(*top) for top in each.top]}
        for each in known
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, known: Seq[TokenLogprob | int], offset: int
) -> CompletionLogprobs:
    """A bare id is a token without a logprob, the prompt's first. `offset`: characters before."""
    made: CompletionLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for each in known:
        text = spell(tokenizer, each if isinstance(each, int) else each.token_id).text
        made["tokens"].append(text)
        made["text_offset"].append(offset)
        offset += len(text)
        if isinstance(each, int):
            made["token_logprobs"].append(None)
            made["top_logprobs"].append(None)
            continue
        made["token_logprobs"].append(each.logprob)
        best = {spell(tokenizer, token).text: logprob for token, logprob in reversed(each.top)}
        made["top_logprobs"].append({**best, text: each.logprob})
    return made


def prompt_logprobs(tokenizer: Tokenizer, known: Seq[TokenLogprob]) -> PromptLogprobs:
    made: PromptLogprobs = [None]
    for each in known:
        pairs = dict((*each.top, (each.token_id, each.logprob)))
        made.append(
            {
                str(token): PromptLogprob(
                    logprob=logprob, decoded_token=spell(tokenizer, token).text
                )
                for token, logprob in pairs.items()
            }
        )
    return made
