"""Two models on one trajectory: Alternate, and a scripted best of N, through the real engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer as Backend

from engine.config import EngineConfig, ModelSpec
from engine.engine import Engine
from engine.output import Output
from engine.request import MAIN, Role, SamplingParams, Sequence
from engine.scheduler.controller import (
    Adopt,
    Branch,
    Controller,
    Decision,
    Edit,
    ThoughtEvent,
    TokenEvent,
    Watch,
)
from engine.scheduler.controllers.alternate import Alternate
from tests.scripted import tiny_folder, tiny_spec

PROMPTS = [list(range(40, 47)), [200, 3], list(range(100, 180)), [5]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("models")
    return tiny_folder(path / "one", seed=1), tiny_folder(path / "two", seed=2)


@dataclass(frozen=True)
class Breaks(Controller):
    """Ends a thought after every `every` tokens: random models seldom write a blank line."""

    blank: tuple[int, ...]
    every: int

    def watch(self) -> Watch:
        return BreakWatch(self)


class BreakWatch(Watch):
    def __init__(self, breaks: Breaks) -> None:
        self._breaks = breaks

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        length = event.position + 1 - seq.prompt_len
        due = event.origin == "sampled" and length % self._breaks.every == 0
        return Edit(append=self._breaks.blank) if due else None


@dataclass(frozen=True)
class Notes(Controller):
    """Writes down each token's role and each thought."""

    tokens: dict[str, list[TokenEvent]] = field(default_factory=dict)
    thoughts: dict[str, list[ThoughtEvent]] = field(default_factory=dict)

    def watch(self) -> Watch:
        return NoteWatch(self)


class NoteWatch(Watch):
    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        self._notes.tokens.setdefault(seq.id, []).append(event)
        return None

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        self._notes.thoughts.setdefault(seq.id, []).append(event)
        return None

    def rewound(self, seq: Sequence, pos: int) -> None:
        thoughts = self._notes.thoughts.get(seq.id, [])
        thoughts[:] = [event for event in thoughts if event.end <= pos]


class Turn(NamedTuple):
    """Tokens that one model sampled in a row, and all that stood before them."""

    prefix: list[int]
    events: list[TokenEvent]


NEWLINE = 198
PARAMS = SamplingParams(
    temperature=0.8,
    top_k=40,
    seed=11,
    max_tokens=70,
    ignore_eos=True,
    logit_bias={NEWLINE: -100.0},  # thoughts end where Breaks says so
)


def blank_line(folder: str) -> tuple[int, ...]:
    backend: Backend = Backend.from_file(str(Path(folder) / "tokenizer.json"))
    return tuple(backend.encode("\n\n").ids)


def run(config: EngineConfig, params: SamplingParams = PARAMS) -> list[Output]:
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, params)
        engine.check()
        stats = engine.stats()
        assert all(kv.used_pages == 0 for kv in stats.kv.values())
        return outputs


@pytest.mark.parametrize("tokens", [2048, 176])
def test_each_thought_is_what_its_model_alone_writes(folders: tuple[str, str], tokens: int) -> None:
    notes = Notes()
    controllers = (Breaks(blank_line(folders[0]), 9), Alternate(every=2), notes)
    config = tiny_spec(
        folders[0], helper=folders[1], controllers=controllers, tokens=tokens, max_num_seqs=4
    )
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert (engine.stats().scheduler.preemptions > 0) == (tokens == 176)
        ran = engine.stats().scheduler.ran_tokens
        assert ran["helper"] > 0
    turns: dict[Role, list[Turn]] = {MAIN: [], "helper": []}
    for output in outputs:
        assert len(output.token_ids) == PARAMS.max_tokens
        whole = [*output.prompt_token_ids, *output.token_ids]
        events = notes.tokens[output.id]
        assert [event.token for event in events] == list(output.token_ids)
        for number, thought in enumerate(notes.thoughts[output.id], 1):
            role = "helper" if number % 2 == 0 else MAIN
            own = [e for e in events if thought.start <= e.position < thought.end]
            assert {event.role for event in own} == {role}
            for sampled, run in groupby(own, lambda event: event.origin == "sampled"):
                row = list(run)
                if sampled:
                    turns[role].append(Turn(whole[: row[0].position], row))
        assert len(notes.thoughts[output.id]) == 8
    assert_alone(folders, turns, PARAMS)


def assert_alone(
    folders: tuple[str, str], turns: dict[Role, list[Turn]], params: SamplingParams
) -> None:
    """Each model alone, given what stood before a turn, says what the turn says."""
    for role, folder in zip((MAIN, "helper"), folders, strict=True):
        with Engine(tiny_spec(folder)) as alone:
            asked = [replace(params, max_tokens=len(turn.events)) for turn in turns[role]]
            given = alone.generate([turn.prefix for turn in turns[role]], asked)
        for turn, output in zip(turns[role], given, strict=True):
            assert output.token_ids == tuple(event.token for event in turn.events)


@dataclass(frozen=True)
class TakeBack(Controller):
    """Every third thought and the one before it are taken back, once each; `word` comes instead."""

    word: tuple[int, ...]

    def watch(self) -> Watch:
        return TakeBackWatch(self.word)


class TakeBackWatch(Watch):
    def __init__(self, word: tuple[int, ...]) -> None:
        self._word = word
        self.taken: set[int] = set()

    def on_thought(self, seq: Sequence, event: ThoughtEvent) -> Decision:
        number = len(seq.thought_ends)
        if number % 3 or number in self.taken:
            return None
        self.taken.add(number)
        return Edit(truncate=seq.thought_ends[-3], append=self._word)

    def settled(self, seq: Sequence) -> int:
        return seq.prompt_len  # it may go back as far as that


@pytest.mark.parametrize("word", [(70, 71), ()], ids=["forced", "bare"])
@pytest.mark.parametrize("tokens", [2048, 176])
def test_alternate_is_rolled_back_by_an_edit(
    folders: tuple[str, str], tokens: int, word: tuple[int, ...]
) -> None:
    """Over hand-overs: the right model takes its turn again, and both caches are cut."""
    notes = Notes()
    blank = Breaks(blank_line(folders[0]), 9)
    config = tiny_spec(
        folders[0],
        helper=folders[1],
        controllers=(TakeBack(word), blank, Alternate(), notes),
        tokens=tokens,
        max_num_seqs=4,
    )
    params = replace(PARAMS, temperature=0.0)
    with Engine(config) as engine:
        ids = [engine.add(prompt, params) for prompt in PROMPTS]
        outputs: dict[str, Output] = {}
        while engine.has_work():
            outputs |= {d.id: d.output for d in engine.step() if d.output is not None}
            engine.check()
    turns: dict[Role, list[Turn]] = {MAIN: [], "helper": []}
    for id in ids:
        output = outputs[id]
        whole = [*output.prompt_token_ids, *output.token_ids]
        final = {event.position: event for event in notes.tokens[id]}  # the last at each place
        events = [final[at] for at in range(len(output.prompt_token_ids), len(whole))]
        assert [event.token for event in events] == list(output.token_ids)
        assert len(notes.tokens[id]) > len(events) + 20, "much was taken back"
        for number, thought in enumerate(notes.thoughts[id], 1):
            role = "helper" if number % 2 == 0 else MAIN
            own = [e for e in events if thought.start <= e.position < thought.end]
            for sampled, run in groupby(own, lambda event: event.origin == "sampled"):
                row = list(run)
                if sampled:
                    assert {event.role for event in row} == {role}
                    turns[role].append(Turn(whole[: row[0].position], row))
    assert min(map(len, turns.values())) >= 8
    assert_alone(folders, turns, params)


def test_one_model_in_both_roles_gives_what_one_role_gives(folders: tuple[str, str]) -> None:
    breaks = Breaks(blank_line(folders[0]), 9)
    alone = run(tiny_spec(folders[0], controllers=(breaks,)))
    both = run(tiny_spec(folders[0], helper=folders[0], controllers=(breaks, Alternate())))
    assert [output.token_ids for output in both] == [output.token_ids for output in alone]


def test_the_helper_from_the_first_thought(folders: tuple[str, str]) -> None:
    breaks = Breaks(blank_line(folders[0]), 9)
    config = tiny_spec(folders[0], helper=folders[1], controllers=(breaks, Alternate(every=1)))
    alone = run(tiny_spec(folders[1], controllers=(breaks,)))
    assert [o.token_ids for o in run(config)] == [o.token_ids for o in alone]


def test_different_tokenizers_are_refused(folders: tuple[str, str], tmp_path: Path) -> None:
    other = Path(tiny_folder(tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace("<think>", "<muse>"))
    with pytest.raises(ValueError, match=r"different tokenizers.*other.*share one"):
        Engine(tiny_spec(folders[0], helper=str(other)))


def test_a_missing_role_is_refused(folders: tuple[str, str]) -> None:
    models = {MAIN: ModelSpec(folders[0])}
    with pytest.raises(ValueError, match=r"Alternate uses the roles \['tutor'\].*\['main'\]"):
        EngineConfig(models=models, controllers=(Alternate(helper="tutor"),))


# best of N


class Candidate(NamedTuple):
    """What a child wrote behind `prefix`, and main's logprobs of it."""

    role: Role
    prefix: list[int]
    tokens: list[int]
    score: list[float]

    @property
    def mean(self) -> float:
        return sum(self.score) / len(self.score)


@dataclass(frozen=True)
class BestOf(Controller):
    """Every few tokens are the best of three candidates of two roles, judged by main's mean."""

    rounds: dict[str, list[list[Candidate]]] = field(default_factory=dict)

    roles = (MAIN, "helper")
    children = {MAIN: 3, "helper": 2}  # noqa: RUF012

    def watch(self) -> Watch:
        return BestOfWatch(self.rounds)


class BestOfWatch(Watch):
    def __init__(self, rounds: dict[str, list[list[Candidate]]]) -> None:
        self._rounds = rounds
        self._candidates: list[Sequence] = []
        self._next = 0  # the length at which another round begins

    def begin(self, seq: Sequence) -> Decision:
        # so hot that the helper's drafts please main as often as its own
        hot = SamplingParams(temperature=100.0, ignore_eos=True)
        return [Branch(role=role, max_tokens=8, params=hot) for role in (MAIN, "helper", "helper")]

    def on_join(self, seq: Sequence, children: Seq[Sequence]) -> Decision:
        at = len(seq.tokens)
        if not self._candidates:
            self._candidates = list(children)
            return [Branch(append=tuple(c.tokens[at:]), until="scored") for c in children]
        written, self._candidates = self._candidates, []
        judged = [
            Candidate(each.role, list(seq.tokens), each.tokens[at:], list(child.score or ()))
            for each, child in zip(written, children, strict=True)
        ]
        self._rounds.setdefault(seq.id, []).append(judged)
        best = max(range(len(judged)), key=lambda i: judged[i].mean)
        self._next = at + len(judged[best].tokens)
        return Adopt(written[best])

    def on_token(self, seq: Sequence, event: TokenEvent) -> Decision:
        return self.begin(seq) if event.position + 1 == self._next else None


@pytest.mark.parametrize("tokens", [4096, 208])
def test_best_of_n(folders: tuple[str, str], tokens: int) -> None:
    best, notes = BestOf(), Notes()
    params = replace(PARAMS, max_tokens=30, seed=2)
    config = tiny_spec(
        folders[0], helper=folders[1], controllers=(best, notes), tokens=tokens, max_num_seqs=4
    )
    outputs = run(config, params)
    chosen: Counter[Role] = Counter()
    with Engine(tiny_spec(folders[0])) as judge:
        for output in outputs:
            assert len(output.token_ids) == params.max_tokens
            # every token once, all of them adopted
            events = notes.tokens[output.id]
            first = len(output.prompt_token_ids)
            assert [event.token for event in events] == list(output.token_ids)
            assert [event.position for event in events] == list(range(first, first + 30))
            assert {event.origin for event in events} == {"adopted"}
            rounds = best.rounds[output.id]
            assert len(rounds) == 4  # of 8 tokens; the last one is cut
            whole = [*output.prompt_token_ids, *output.token_ids]
            for judged in rounds:
                assert len({tuple(candidate.tokens) for candidate in judged}) == 3
                winner = max(judged, key=lambda candidate: candidate.mean)
                chosen[winner.role] += 1
                behind = whole[len(winner.prefix) :][: len(winner.tokens)]
                assert winner.tokens[: len(behind)] == behind
                for candidate in judged:
                    text = candidate.prefix + candidate.tokens
                    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
                    known = judge.generate([text], asked)[0].prompt_logprobs
                    assert known is not None
                    own = [each.logprob for each in known[-len(candidate.tokens) :]]
                    assert candidate.score == pytest.approx(own, abs=1e-4)
    assert len(chosen) == 2, "both roles win now and then"
