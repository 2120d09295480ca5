"""The logits rules that a request's own settings make; biases and allowed ids are the sampler's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.request import LogitsRule, Mask, SamplingParams


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
    """What depends on the length; `stop_ids` are those that end the sequence."""
    if not params.min_tokens or not stop_ids:
        return ()
    return (MinTokens(prompt_len + params.min_tokens, Mask(ban=tuple(sorted(stop_ids)))),)
