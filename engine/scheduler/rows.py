"""Which rows go first, and the logprobs of known tokens that rows bring."""

from __future__ import annotations

from itertools import groupby

from engine.request import Role, Row, RowOutput
from engine.scheduler.track import Track

Wanted = list[tuple[Track, int]]
"""Tracks, the urgent first, and how many tokens each has left to run."""


def groups(wanted: Wanted) -> list[Wanted]:
    """Decodes, then the longer ones of each priority.

    A long prompt holds up no decode, and the prompts of one priority move together.
    """
    longer = [item for item in wanted if item[1] > 1]
    classes = groupby(longer, key=lambda item: item[0].seq.priority)
    return [[item for item in wanted if item[1] == 1], *(list(group) for _, group in classes)]


def given(track: Track, role: Role, start: int) -> int | None:
    """Whether a row must also answer the logprobs of known tokens, and with how many others."""
    seq = track.seq
    if track.scored:
        return 0
    missing = start <= len(seq.prompt_logprobs) < seq.prompt_len - 1
    if track.parent is None and role == seq.role and missing:
        return seq.params.prompt_logprobs
    return None


def collect(track: Track, row: Row, got: RowOutput) -> None:
    """Keep what `given` asked for; the prompt's once, however often it is computed."""
    seq = track.seq
    if track.scored:
        assert seq.score is not None
        seq.score.extend(each.logprob for each in got.given)
        return
    have = len(seq.prompt_logprobs)
    seq.prompt_logprobs.extend(got.given[have - row.start : seq.prompt_len - 1 - row.start])
