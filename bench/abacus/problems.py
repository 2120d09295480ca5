"""Problems whose answers need a chain: loop programs, ledgers, sums in columns.

All arithmetic is of single digits, so a step of a chain is easy and the chain is what matters: each
step recalls what earlier ones found. A chain is its question's program with the values written in,
`name=value` after every name: the last such value of a name counts.

    loop    "a=3 b=5; loop 2: a:a+b b:b*3; b?"
            "2: a:a=3+b=5>a=8 b:b=5*3>b=5", "1: a:a=8+b=5>a=3 b:b=5*3>b=5", "b=5"
            the statements, each the name that it sets and what to, modulo 10, run n times over
    ledger  "k=4 d:k+3 m:d-k; m k?"
            "k=4", "d:k=4+3>d=7", "m:d=7-k=4>m=3", "m=3 k=4"
            each name once, from names before it; asked about out of order
    sum     "sum a:4+7 b:8+6; b a?"
            "a:4+7+0>1 a=1", "b:8+6+1>1 b=5", "b=5 a=1"
            two numbers by columns, the lowest first: digits and carry, the new carry, the digit

Only ledgers are re-checked: their values never change, so working a line out again is the same
recall. How far back a value must be recalled is the knob of difficulty: the number of names,
statements and rounds, and `FAR`, the share of a ledger's references to any name rather than a near
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

LETTERS = "abcdefghijklmnopqrstuvwxyz"
FAR = 0.5
TRIES = 1000  # before a length is given up
BLANK = "\n\n"
RETOLD = 6  # lines
_NAMED = re.compile("[a-z][=:]")


class Piece(NamedTuple):
    """Some text of a chain; what isn't `learned` is read but never imitated: a slip, or which line
    a drill works out again."""

    text: str
    learned: bool = True


Thought = tuple[Piece, ...]


@dataclass(frozen=True)
class Problem:
    """A question, thoughts that lead to its answer, and the answer."""

    kind: str
    question: str
    thoughts: tuple[Thought, ...]
    answer: str

    @property
    def chain(self) -> str:
        return BLANK.join("".join(p.text for p in thought) for thought in self.thoughts)


@dataclass(frozen=True)
class Habits:
    """What training chains have beside the computation.

    `checks` is the chance of a re-check (of another after it half as much), `slips` of one wrong
    result that a re-check then finds, `retold` of a drill in re-checking: many lines in random
    order, of which the choice isn't learned but what follows from it is.
    """

    checks: float = 0.0
    slips: float = 0.0
    retold: float = 0.0


PLAIN = Habits()


class Line(NamedTuple):
    """One computed result: `name` is found by `work`, which ends before the result."""

    name: str
    work: str
    result: str

    def __str__(self) -> str:
        return self.work + self.result


@dataclass(frozen=True)
class Draft:
    """A problem before re-checks and slips."""

    question: str
    labels: list[str]  # what each thought begins with
    lines: list[list[Line]]  # of each thought
    checked: list[str]  # names whose lines may be worked out again
    loose: list[str]  # of them, those on whose lines no other depends
    last: Callable[[dict[str, str]], str]  # the closing thought, from the results by name
    answer: Callable[[dict[str, str]], str]


def sample(rng: Random, kind: str | None, least: int, most: int, habits: Habits = PLAIN) -> Problem:
    """A problem of a kind (None: of the default mix) with `least` to `most` tokens of chain,
    re-checks and slips not counted. ValueError: a length that the kind doesn't have."""
    for _ in range(TRIES):
        chosen = kind or rng.choices(list(MIX), list(MIX.values()))[0]
        draft = KINDS[chosen](rng, rng.randint(least, most))
        if least <= tokens_of(_finish(rng, chosen, draft, PLAIN).chain) <= most:
            return _finish(rng, chosen, draft, habits)
    raise ValueError(f"found no {kind or 'such'} problem with {least} to {most} tokens of chain")


def tokens_of(text: str) -> int:
    """Characters are tokens, and so are a blank line and a name with its equals sign or colon."""
    return len(text) - text.count(BLANK) - len(_NAMED.findall(text))


def _finish(rng: Random, kind: str, draft: Draft, habits: Habits) -> Problem:
    found = {line.name: line for lines in draft.lines for line in lines}  # the last of each name
    slip = None
    if draft.loose and rng.random() < habits.slips:
        slip = found[rng.choice(draft.loose)]
    wrong = str((int(slip.result) + rng.randint(1, 9)) % 10) if slip else ""
    thoughts = []
    for label, lines in zip(draft.labels, draft.lines, strict=True):
        thought = [Piece(label)]
        for index, line in enumerate(lines):
            thought.append(Piece(" " * bool(index) + line.work))
            thought.append(Piece(wrong, False) if line is slip else Piece(line.result))
        thoughts.append(tuple(thought))
    chance = habits.checks if draft.checked else 0.0
    if draft.checked and not slip and rng.random() < habits.retold:
        some = rng.sample(list(found.values()), min(len(found), RETOLD))
        thoughts += [_retold(line) for line in some]
        chance = 0.0
    while slip or rng.random() < chance:
        line = slip if slip and rng.random() < 0.7 else found[rng.choice(draft.checked)]
        verdict = f"was {wrong}" if line is slip else "ok"
        thoughts.append((Piece(f"check {line} {verdict}"),))
        slip = None if line is slip else slip
        chance /= 2
    results = {name: line.result for name, line in found.items()}
    thoughts.append((Piece(draft.last(results)),))
    return Problem(kind, draft.question, tuple(thoughts), draft.answer(results))


def _retold(line: Line) -> Thought:
    """A re-check whose line, told by its first two characters, isn't the model's choice."""
    text = f"{line} ok"
    return Piece(f"check {text[:2]}", False), Piece(text[2:])


class Statement(NamedTuple):
    """`name:x sign y`; y is a name or a digit."""

    x: str
    sign: str
    y: str
    name: str

    def __str__(self) -> str:
        return f"{self.name}:{self.x}{self.sign}{self.y}"

    def run(self, values: dict[str, int]) -> Line:
        x, y = values[self.x], values[self.y] if self.y in values else int(self.y)
        values[self.name] = {"+": x + y, "-": x - y, "*": x * y}[self.sign] % 10
        y_text = f"{self.y}={y}" if self.y in LETTERS else self.y
        work = f"{self.name}:{self.x}={x}{self.sign}{y_text}>{self.name}="
        return Line(self.name, work, str(values[self.name]))


def _statement(rng: Random, names: list[str], target: str) -> Statement:
    """Products only by 3, 7 and 9, which lose nothing modulo 10."""
    if rng.random() < 0.2:
        return Statement(rng.choice(names), "*", rng.choice("379"), target)
    sign = rng.choice("+-")
    if len(names) > 1 and rng.random() < 0.7:
        x, y = rng.sample(names, 2)
        return Statement(x, sign, y, target)
    return Statement(rng.choice(names), sign, str(rng.randint(1, 9)), target)


def _loop(rng: Random, tokens: int) -> Draft:
    size = rng.choice([size for size in (1, 2, 3, 4) if size == 1 or size * 22 <= tokens])
    rounds = max(2, min(99, round(tokens / (size * 9.7 + 3))))
    names = rng.sample(LETTERS, rng.randint(max(2, size), 5))
    values = {name: rng.randint(0, 9) for name in names}
    given = " ".join(f"{name}={value}" for name, value in values.items())
    body = [_statement(rng, names, target) for target in rng.sample(names, size)]
    lines = [[statement.run(values) for statement in body] for _ in range(rounds)]
    if lines[-1] == lines[-2]:  # nothing moves: there is nothing to simulate
        return _loop(rng, tokens)
    asked = rng.randrange(size)
    name = body[asked].name
    return Draft(
        question=f"{given}; loop {rounds}: {' '.join(map(str, body))}; {name}?",
        labels=[f"{left}: " for left in range(rounds, 0, -1)],
        lines=lines,
        checked=[],
        loose=[],
        last=lambda found: f"{name}={found[name]}",
        answer=lambda found: found[name],
    )


def _ledger(rng: Random, tokens: int) -> Draft:
    given = rng.randint(1, 3)
    count = max(given + 1, min(26, round((tokens - 8) / 9.7 + given * 0.6)))
    names = rng.sample(LETTERS, count)
    values: dict[str, int] = {}
    entries, lines, used = [], [], set()
    for index, name in enumerate(names):
        if index < given:
            values[name] = rng.randint(0, 9)
            entries.append(f"{name}={values[name]}")
            lines.append([Line(name, f"{name}=", str(values[name]))])
            continue
        near = names[:index] if rng.random() < FAR else names[max(0, index - 3) : index]
        statement = _statement(rng, near, name)
        used |= {statement.x, statement.y}
        entries.append(str(statement))
        lines.append([statement.run(values)])
    asked = rng.sample(names, min(count, rng.randint(1, 4)))
    return Draft(
        question=f"{' '.join(entries)}; {' '.join(asked)}?",
        labels=[""] * count,
        lines=lines,
        checked=asked,
        loose=[name for name in asked if name not in used],
        last=lambda found: _values(asked, found),
        answer=lambda found: " ".join(found[name] for name in asked),
    )


def _sum(rng: Random, tokens: int) -> Draft:
    count = max(2, min(26, round((tokens - 8) / 12)))
    names = rng.sample(LETTERS, count)
    columns, lines, carry = [], [], 0
    for name in names:
        x, y = rng.randint(0, 9), rng.randint(0, 9)
        columns.append(f"{name}:{x}+{y}")
        total = x + y + carry
        work = f"{name}:{x}+{y}+{carry}>{total // 10} {name}="
        carry = total // 10
        lines.append([Line(name, work, str(total % 10))])
    asked = rng.sample(names, min(count, rng.randint(1, 4)))
    return Draft(
        question=f"sum {' '.join(columns)}; {' '.join(asked)}?",
        labels=[""] * count,
        lines=lines,
        checked=[],
        loose=[],
        last=lambda found: _values(asked, found),
        answer=lambda found: " ".join(found[name] for name in asked),
    )


def _values(names: list[str], found: dict[str, str]) -> str:
    return " ".join(f"{name}={found[name]}" for name in names)


KINDS: dict[str, Callable[[Random, int], Draft]] = {"loop": _loop, "ledger": _ledger, "sum": _sum}
MIX = {"loop": 0.5, "ledger": 0.3, "sum": 0.2}
"""The default mix: the chance of each kind."""
