"""The rule of a grammar: rewound and forked, it is what a fresh one is that reads the same."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Finish, Mask, Role, SamplingParams, Sequence
from engine.scheduler.controllers.grammar import GrammarRule, Grammars
from engine.scheduler.controllers.thinking_budget import ThinkingBudget
from engine.scheduler.reasoning import Markers
from tests.scheduler.fakes import CLOSE, EOS, OPEN, Rig, token_bytes

THINK = Markers(start=(OPEN,), end=(CLOSE,), closing=(*b"ok", CLOSE), turns=frozenset((EOS,)))
LONG = Markers(start=(40, 41), end=(60, 61, 62), closing=(60, 61, 62), turns=frozenset((EOS,)))
VOCAB = 260


@dataclass
class Brackets:
    """[ then up to three of a, b, OPEN and 61, then ]."""

    taken: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.taken[-1:] == [93]

    def allowed(self) -> set[int]:
        if self.done:
            return {EOS}
        if not self.taken:
            return {91}
        return {93} if len(self.taken) == 4 else {93, 97, 98, OPEN, 61, 40, 41, 62, 60}

    def mask(self) -> bytes:
        return sum(1 << token for token in self.allowed()).to_bytes(VOCAB // 8 + 1, "little")

    def accept(self, token: int) -> bool:
        legal = token in self.allowed()
        if legal:
            self.taken.append(token)
        return legal

    def rewind(self, count: int) -> None:
        assert 0 <= count <= len(self.taken)
        del self.taken[len(self.taken) - count :]

    def fork(self) -> Brackets:
        return Brackets(self.taken.copy())


def allowed(mask: Mask | None) -> set[int] | None:
    """None: all."""
    if mask is None:
        return None
    if mask.allow is not None:
        ids = set(mask.allow)
    else:
        assert mask.allow_bits is not None
        number = int.from_bytes(mask.allow_bits, "little")
        ids = {i for i in range(VOCAB) if number >> i & 1}
    return ids - set(mask.ban)


def said(rule: GrammarRule, tokens: Seq[int]) -> object:
    try:
        return allowed(rule.mask(tokens)), rule.read(tokens)
    except ValueError as error:
        return str(error)


@given(
    st.sampled_from((Markers(), THINK, LONG)),
    st.lists(st.sampled_from((7, EOS, OPEN, CLOSE, 40, 41, 60, 61, 62)), max_size=5),
    st.data(),
)
def test_it_is_what_a_fresh_one_is(
    markers: Markers, prompt: list[int], data: st.DataObject
) -> None:
    tokens, floor = prompt.copy(), len(prompt)
    rule = GrammarRule(Brackets(), markers, prompt)
    for _ in range(data.draw(st.integers(0, 14))):
        act = data.draw(st.sampled_from(("append", "append", "append", "rewind", "fork")))
        if act == "append":
            known = said(rule, tokens)
            legal = known[0] if isinstance(known, tuple) else None
            any_token = st.sampled_from((7, 91, 97, 93, OPEN, CLOSE, 40, 41, 60, 61, 62))
            by_rule = st.sampled_from(sorted(legal)) if legal else any_token
            tokens.append(data.draw(st.one_of(by_rule, by_rule, any_token)))
        elif act == "rewind":
            pos = data.draw(st.integers(floor, len(tokens)))
            del tokens[pos:]
            rule.rewind(pos)
        else:
            twin, rule = rule, rule.fork()
            twin.read([*tokens, 91, 97])  # goes its own way
            floor = len(tokens)  # what it shares with its parent isn't its own to take back
        assert said(rule, tokens) == said(GrammarRule(Brackets(), markers, prompt), tokens)


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ([7], [], {91, OPEN}),
        ([7], [OPEN], None),
        ([7], [OPEN, 97, CLOSE], {91}),
        ([7, OPEN], [], None),
        ([7, OPEN, 97, CLOSE], [], {91}),
        ([7, OPEN, 97, CLOSE, EOS], [], {91, OPEN}),
        ([7], [91], {93, 97, 98, 40, 41, 60, 61, 62}),
    ],
)
def test_what_is_allowed(prompt: list[int], tokens: list[int], expected: set[int] | None) -> None:
    rule = GrammarRule(Brackets(), THINK, prompt)
    assert allowed(rule.mask([*prompt, *tokens])) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], {91, 40}),
        ([40], {41}),
        ([40, 41], None),
        ([40, 41, 97, 60, 61, 62], {91}),
        ([91, 97, 40], {93, 97, 98, OPEN, 40, 60, 61, 62}),  # not the marker's last token
        ([91, 60, 61], {93, 97, 98, OPEN, 40, 41, 60, 61}),
    ],
)
def test_markers_of_several_tokens(tokens: list[int], expected: set[int] | None) -> None:
    rule = GrammarRule(Brackets(), LONG, [7])
    assert allowed(rule.mask([7, *tokens])) == expected


def test_the_sequence_ends_with_its_form() -> None:
    def model(role: Role, seen: Seq[int], lineage: int) -> int:
        script: list[int] = [OPEN, 97, 97, 97, 97, *b"ok", CLOSE, *b"[ab]zz"]
        return script[len(seen) - 1]

    budget = ThinkingBudget(markers=THINK, token_bytes=token_bytes)
    rig = Rig(model, controllers=(budget, Grammars(markers=THINK)), markers=THINK)
    seq = Sequence(
        "r", 1, [112], SamplingParams(thinking_token_budget=4, min_tokens=20), matcher=Brackets()
    )
    rig.scheduler.add([seq])
    rig.finish()
    assert bytes(seq.tokens[-4:]) == b"[ab]"
    assert seq.finish == Finish("stop")
