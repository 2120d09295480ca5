"""The logits rules that a request's own settings make. All are stateless: masks of fixed ids."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.request import LogitsRule, Mask, SamplingParams


@dataclass(frozen=True, slots=True)
class FixedMask:
    """The same mask for every token: allowed ids, biases."""

    always: Mask

    def mask(self, tokens: Seq[int]) -> Mask | None:
        return self.always

    def fork(self) -> LogitsRule:
        return self

    def rewind(self, pos: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Bans what would end the sequence while it is shorter than `length`, its prompt included."""

    length: int
    ban: Mask

    def mask(self, tokens: Seq[int]) -> Mask | None:
        return self.ban if len(tokens) < self.length else None

    def fork(self) -> LogitsRule:
        return self

    def rewind(self, pos: int) -> None:
        pass


def rules_of(
    params: SamplingParams, prompt_len: int, stop_ids: frozenset[int]
) -> tuple[LogitsRule, ...]:
    """What `params` asks for; `stop_ids` are those that end the sequence."""
    rules: list[LogitsRule] = []
    if params.min_tokens and stop_ids:
        rules.append(MinTokens(prompt_len + params.min_tokens, Mask(ban=tuple(sorted(stop_ids)))))
    if params.allowed_token_ids is not None:
        rules.append(FixedMask(Mask(allow=tuple(params.allowed_token_ids))))
    if params.logit_bias:
        rules.append(FixedMask(Mask(bias=dict(params.logit_bias))))
    return tuple(rules)
