"""Stop rules: EOS, ids, strings across tokens, lengths, what is held back, logits rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Finish, Mask, SamplingParams, Sequence
from engine.scheduler.controller import Edit, TokenEvent
from engine.scheduler.match import Pattern
from engine.scheduler.reasoning import Markers
from engine.scheduler.stop import StopRules, StopStrings, StopWatch
from tests.scheduler.fakes import CLOSE, EOS, OPEN, ids, token_bytes

THINK = Markers(start=(OPEN,), end=(CLOSE,), closing=(CLOSE,))


def rules(**options: object) -> StopRules:
    settings = {"eos_ids": (EOS,), "max_model_len": 100, "token_bytes": token_bytes, **options}
    return StopRules(**settings)  # type: ignore[arg-type]


class Feed:
    """One sequence under stop rules alone."""

    def __init__(self, of: StopRules | None = None, prompt: str = "p", **params: object) -> None:
        self.seq = Sequence("r", len(prompt), ids(prompt), SamplingParams(**params))  # type: ignore[arg-type]
        self.watch: StopWatch = (of or rules()).watch()
        self.began = self.watch.begin(self.seq)

    def push(self, *tokens: int) -> Finish | None:
        for token in tokens:
            self.seq.tokens.append(token)
            event = TokenEvent(token, len(self.seq.tokens) - 1, "main", "sampled")
            edit = self.watch.on_token(self.seq, event)
            if edit is not None:
                assert isinstance(edit, Edit)
                return edit.finish
        return None

    @property
    def held(self) -> int:
        return len(self.seq.tokens) - self.watch.settled(self.seq)


@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=40))
def test_pattern_finds_what_a_plain_search_finds(pattern: str, text: str) -> None:
    state, data = 0, text.encode()
    p = Pattern(pattern.encode())
    for at in range(len(data)):
        state = p.step(state, data[at])
        seen = data[: at + 1]
        assert (state == len(pattern)) == seen.endswith(pattern.encode())
        longest = max(k for k in range(len(pattern) + 1) if seen.endswith(pattern.encode()[:k]))
        assert state == longest
    assert (p.scan(0, data).end is not None) == (pattern in text)
    if pattern in text:
        assert p.scan(0, data).end == text.index(pattern) + len(pattern)


def test_eos_and_ids() -> None:
    assert Feed().push(97, EOS) == Finish("stop", EOS)
    assert Feed(ignore_eos=True, stop_token_ids=(99,)).push(EOS, EOS, 99) == Finish("stop", 99)


def test_lengths() -> None:
    assert Feed(max_tokens=3).push(97, 97, 97) == Finish("length")
    assert Feed(max_tokens=3).push(97, 97) is None
    assert Feed(rules(max_model_len=4), max_tokens=None).push(97, 97, 97) == Finish("length")
    assert Feed(max_tokens=1).push(EOS) == Finish("stop", EOS)
    full = Feed(rules(max_model_len=3), prompt="abc")
    assert full.began == Edit(finish=Finish("length"))


@pytest.mark.parametrize(("include", "drop"), [(False, 3), (True, 0)])
def test_stop_string_over_token_boundaries(include: bool, drop: int) -> None:
    feed = Feed(stop="END", include_stop_str_in_output=include)
    assert feed.push(*ids("EEN")) is None
    assert feed.push(*ids("D")) == Finish("stop", "END", drop)


def test_stop_string_inside_a_token() -> None:
    words = {300: b"ab.\n", 301: b"\nQ"}
    stop = rules(token_bytes=lambda t: words[t])
    assert Feed(stop, stop="\n\n").push(300, 301) == Finish("stop", "\n\n", 3)
    feed = Feed(stop, stop="\n\n", include_stop_str_in_output=True)
    assert feed.push(300, 301) == Finish("stop", "\n\n", 1)


def test_the_match_that_ends_first_wins_then_the_longest() -> None:
    one = rules(token_bytes=lambda _: b"xabcd")
    assert Feed(one, stop=("bcd", "ab")).push(1) == Finish("stop", "ab", 4)
    assert Feed(one, stop=("bc", "abc")).push(1) == Finish("stop", "abc", 4)


def test_multibyte_stop_string_cut_inside_a_character() -> None:
    feed = Feed(stop="\u00e9t")
    assert feed.push(0xC3) is None
    assert feed.held == 1
    assert feed.push(0xA9, *b"t") == Finish("stop", "\u00e9t", 3)


def test_exactly_the_overlap_is_held() -> None:
    feed = Feed(stop=("aab", "zq"))
    assert [(feed.push(t), feed.held)[1] for t in ids("xaaaz")] == [0, 1, 2, 2, 1]


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=30))
def test_settled_never_decreases_and_leaks_no_part(stop: str, text: str) -> None:
    feed, settled = Feed(stop=stop, max_tokens=None), 1
    for token in ids(text):
        finish = feed.push(token)
        if finish is not None:
            kept = len(feed.seq.tokens) - finish.drop_bytes
            assert settled <= kept
            return
        assert feed.watch.settled(feed.seq) >= settled
        settled = feed.watch.settled(feed.seq)
        held = bytes(feed.seq.tokens[settled:]).decode()
        assert stop.startswith(held)


def test_min_tokens_bans_and_ignores_strings() -> None:
    feed = Feed(min_tokens=3, stop="a", stop_token_ids=(98,))
    (rule,) = feed.watch.rules(feed.seq)
    assert rule.mask(feed.seq.tokens) == Mask(ban=(98, EOS))
    assert feed.push(*ids("aa")) is None
    assert rule.mask(feed.seq.tokens) is not None
    assert feed.push(*ids("a")) == Finish("stop", "a", 1)
    assert rule.mask(feed.seq.tokens) is None


def test_a_forced_eos_stops_even_below_min_tokens() -> None:
    assert Feed(min_tokens=3).push(EOS) == Finish("stop", EOS)


def test_ignore_eos_is_not_banned() -> None:
    feed = Feed(min_tokens=3, ignore_eos=True)
    assert feed.watch.rules(feed.seq) == ()


def test_dormant_while_thinking() -> None:
    feed = Feed(rules(markers=THINK), stop="ab")
    assert feed.push(OPEN, *ids("ab a"), CLOSE) is None
    assert feed.held == 0
    assert feed.push(*ids("b")) is None, "a match must start after the thinking"
    assert feed.push(*ids("ab")) == Finish("stop", "ab", 2)
    feed = Feed(rules(markers=THINK), stop="ab", stop_in_thinking=True)
    assert feed.push(OPEN, *ids("ab")) == Finish("stop", "ab", 2)


def test_rewind() -> None:
    feed = Feed(stop="abc", max_tokens=None)
    feed.push(*ids("xab"))
    del feed.seq.tokens[3:]
    feed.watch.rewound(feed.seq, 3)
    assert feed.held == 1
    assert feed.push(*ids("c")) is None
    assert feed.push(*ids("abc")) == Finish("stop", "abc", 3)


def test_no_strings_cost_nothing() -> None:
    strings = StopStrings(())
    assert strings.held_tokens == 0
    feed = Feed()
    feed.push(*ids("abc"))
    feed.watch.rewound(feed.seq, 2)
    assert feed.held == 0


def test_branch_goes_on_from_its_parent() -> None:
    stop = rules()
    feed = Feed(stop, stop="abc", max_tokens=10)
    feed.push(*ids("xa"))
    tokens = [*feed.seq.tokens, *ids("b")]
    child = Sequence("r", 1, tokens, feed.seq.params)
    watch = stop.branch(feed.watch, tuple(ids("b")), 5)
    assert watch.begin(child) is None
    assert watch.limit == len(tokens) + 5
    child.tokens.append(ord("c"))
    edit = watch.on_token(child, TokenEvent(ord("c"), len(tokens), "main", "sampled"))
    assert edit == Edit(finish=Finish("stop", "abc", 3))
    watch = stop.branch(feed.watch, (), None)
    watch.begin(Sequence("r", 1, feed.seq.tokens.copy(), SamplingParams()))
    assert watch.limit == feed.watch.limit
