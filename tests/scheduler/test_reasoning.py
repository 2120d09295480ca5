"""Markers, thoughts and answer markers: where they end, counted and rewound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.reasoning import (
    AnswerTracker,
    ChainTracker,
    Markers,
    ThinkingTracker,
    starts_inside,
    track_chain,
)
from engine.scheduler.thoughts import Thoughts
from engine.scheduler.track import lineage_of
from tests.scheduler.fakes import CLOSE, EOS, OPEN, ids, token_bytes

ONE = Markers(start=(OPEN,), end=(CLOSE,), closing=(*b"so", CLOSE))
TWO = Markers(start=(1, 2), end=(3, 4), closing=(9, 3, 4))


def feed(tracker: ChainTracker, *tokens: int) -> ChainTracker:
    for token in tokens:
        tracker.feed(token)
    return tracker


def inside(tracker: ChainTracker) -> list[int]:
    return [position for position in range(50) if tracker.inside(position)]


def test_counts_what_is_between_the_markers() -> None:
    tracker = feed(ThinkingTracker(ONE, ids("p")), 97, OPEN, 97, 97)
    assert tracker.thinking
    assert tracker.thinking_tokens == 2
    feed(tracker, CLOSE, 97, 97)
    assert not tracker.thinking
    assert tracker.thinking_tokens == 2
    assert inside(tracker) == [3, 4]


def test_second_block_and_stray_markers() -> None:
    tracker = feed(ThinkingTracker(ONE, ()), CLOSE, OPEN, 97, OPEN, CLOSE, 98, OPEN, 97)
    assert tracker.thinking
    assert tracker.thinking_tokens == 3
    assert inside(tracker) == [2, 3, 7]


def test_the_closing_phrase_is_not_counted() -> None:
    tracker = feed(ThinkingTracker(ONE, ()), OPEN, 97, 97, *ONE.closing)
    assert tracker.thinking_tokens == 2
    assert inside(tracker) == [1, 2, 3, 4], "but it is the chain's text"


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ([7, OPEN, 8], True),
        ([7, OPEN], True),
        ([OPEN, 7, CLOSE], False),
        ([OPEN, CLOSE, OPEN], True),
        ([7], False),
        ([], False),
    ],
)
def test_template_opened_the_block(prompt: list[int], inside: bool) -> None:
    assert starts_inside(ONE, prompt) == inside
    tracker = feed(ThinkingTracker(ONE, prompt), 97)
    assert tracker.thinking == inside
    assert tracker.thinking_tokens == int(inside)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ([OPEN, 7, EOS], False),  # cut in an earlier turn
        ([7, OPEN, 7, EOS, 7, 7], False),  # quoted by the user
        ([OPEN, 7, EOS, OPEN, 7], True),
        ([OPEN, 7, EOS, OPEN, 7, CLOSE, 8], False),
        ([CLOSE, EOS, OPEN], True),
    ],
)
def test_only_the_last_turn_opens_a_block(prompt: list[int], inside: bool) -> None:
    markers = Markers(start=(OPEN,), end=(CLOSE,), turns=frozenset((EOS,)))
    assert starts_inside(markers, prompt) == inside


def test_opened_by_configuration() -> None:
    assert starts_inside(Markers(end=(CLOSE,), opened=True), [7])


def test_markers_of_several_tokens() -> None:
    tracker = feed(ThinkingTracker(TWO, (0, 1)), 2, 5, 3)
    assert tracker.thinking_tokens == 2, "an end marker under way counts until it is complete"
    feed(tracker, 4)
    assert (tracker.thinking, tracker.thinking_tokens) == (False, 1)
    assert starts_inside(TWO, [1, 2, 3, 3])
    assert not starts_inside(TWO, [1, 2, 3, 4])


def test_closing_must_close() -> None:
    with pytest.raises(ValueError, match="must end with the end marker"):
        Markers(start=(1,), end=(2,), closing=(3,))


@given(st.lists(st.sampled_from([1, 2, 3, 4, 9, 5]), max_size=30), st.data())
def test_rewind_and_fork_equal_a_fresh_tracker(tokens: list[int], data: st.DataObject) -> None:
    prompt = [1, 2, 5]
    pos = data.draw(st.integers(0, len(tokens)))
    fresh = feed(ThinkingTracker(TWO, prompt), *tokens[:pos])
    rewound = feed(ThinkingTracker(TWO, prompt), *tokens)
    rewound.rewind(len(prompt) + pos)
    forked = ThinkingTracker(TWO, prompt)
    feed(forked, *tokens[:pos])
    forked = forked.fork()
    for token in (None, *tokens):
        if token is not None:
            feed(fresh, token), feed(rewound, token), feed(forked, token)
        assert fresh.thinking == rewound.thinking == forked.thinking
        assert fresh.thinking_tokens == rewound.thinking_tokens == forked.thinking_tokens
        assert inside(fresh) == inside(rewound)


def chain(*parts: bytes, closing: bytes = b"") -> tuple[AnswerTracker, list[int]]:
    tracker = track_chain(Markers(closing=tuple(closing)), [0, 0], lambda t: parts[t])
    assert isinstance(tracker, AnswerTracker)
    return tracker, list(range(len(parts)))


def test_without_markers_the_chain_runs_to_the_last_answer() -> None:
    tracker, tokens = chain(b"so ", b"\\box", b"ed{1", b"} no ", b"x\\boxed{2}")
    feed(tracker, *tokens[:2])
    assert (tracker.thinking, tracker.thinking_tokens) == (True, 2)
    feed(tracker, tokens[2])
    assert (tracker.thinking, tracker.thinking_tokens) == (False, 1)
    feed(tracker, *tokens[3:])
    assert tracker.thinking_tokens == 4
    assert inside(tracker) == [2, 3, 4, 5]
    tracker.rewind(2 + 2)
    assert (tracker.thinking, tracker.thinking_tokens) == (True, 2)
    feed(tracker, tokens[2])
    assert tracker.thinking_tokens == 1


def test_without_markers_the_closing_phrase_ends_the_chain() -> None:
    closing = b"Answer: \\boxed{"
    tracker = AnswerTracker(Markers(closing=tuple(closing)), 0, token_bytes)
    feed(tracker, *b"hm", *closing, *b"1} or \\boxed{2}")
    assert tracker.thinking_tokens == 2


def thought_ends(text: bytes | list[int], thoughts: Thoughts | None = None) -> list[int]:
    tracker = (thoughts or Thoughts(token_bytes)).tracker()
    ends = [i for i, token in enumerate(text, 1) if tracker.feed(token)]
    return ends + [len(text)] * tracker.close()


def test_thoughts_end_at_blank_lines() -> None:
    assert thought_ends(b"ab\n\ncd\n\n\n\ne") == [4, 8, 11]
    assert thought_ends(b"\n\n\n\nab\n\n") == [8]
    assert thought_ends(b"a\nb") == [3]
    assert thought_ends(b"") == []
    assert thought_ends(b"a\n\n  \n\n") == [3]


def test_a_token_that_holds_the_boundary() -> None:
    words = {0: b"one.\n\nTwo", 1: b".\n", 2: b"\n", 3: b"\n\n"}
    thoughts = Thoughts(lambda t: words[t])
    assert thought_ends([0, 1, 2, 3, 0], thoughts) == [1, 3, 5, 5]
    assert thought_ends([0, 3], thoughts) == [1, 2]


def test_thinking_ends_a_thought() -> None:
    thoughts = Thoughts(token_bytes, markers=ONE)
    assert thought_ends([OPEN, *b"\n\nab", CLOSE, *b"\n\nc"], thoughts) == [6, 9]
    assert thought_ends([OPEN, *b"\n\n", CLOSE, *b"\n\nc"], thoughts) == [7]
    spelled = Thoughts(lambda t: b"<think>" if t == OPEN else token_bytes(t), markers=ONE)
    assert thought_ends([OPEN, *b"\n\nab", CLOSE], spelled) == [6]


@given(st.lists(st.sampled_from([10, 97, 32, OPEN, CLOSE]), max_size=30), st.data())
def test_thoughts_rewind_and_fork(tokens: list[int], data: st.DataObject) -> None:
    pos = data.draw(st.integers(0, len(tokens)))
    thoughts = Thoughts(token_bytes, markers=ONE)
    fresh, rewound = thoughts.tracker(), thoughts.tracker()
    for token in tokens[:pos]:
        fresh.feed(token)
    for token in tokens:
        rewound.feed(token)
    rewound.rewind(pos)
    forked = fresh.fork()
    later = forked.fork()
    for token in tokens[:4]:
        later.feed(token)
    later.rewind(0)
    for token in tokens:
        assert len({t.feed(token) for t in (fresh, rewound, forked, later)}) == 1


def test_lineages_are_stable_and_differ() -> None:
    assert lineage_of(0, 1) == 4059051691542397301
    seen = {lineage_of(parent, i) for parent in (0, 1, 2**63 - 1) for i in range(-1, 100)}
    assert len(seen) == 303
    assert all(0 <= lineage < 2**63 for lineage in seen)
