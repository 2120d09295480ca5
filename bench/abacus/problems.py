"""Problems whose answers need a chain: loop programs, ledgers, sums in columns.

All arithmetic is of single digits, so a step of a chain is easy and the chain is what matters: each
step recalls what earlier ones found. A question, the chain that solves it, and its exact answer:

    loop    "a=3 b=5; loop 2: a=a+b b=b*3; b?"  -> "2: a=a+b=3+5=8 b=b*3=5*3=5", ...
            the body's assignments (modulo 10) run n times; the chain counts down
    ledger  "k=4 d=k+3 m=d-k; d k?"  -> "k=4", "d=k+3=4+3=7", "m=d-k=7-4=3", "d=7 k=4"
            each entry once, from entries before it; asked about out of order
    sum     "sum a:4+7 b:8+6"  -> "a:4+7+0=11", "b:8+6+1=15", "a1 b5 1"
            two numbers by columns, the lowest first; the answer too is lowest digit first

How far back a value must be recalled is the knob of difficulty: the number of variables and of
assignments, and `FAR`, the share of a ledger's references to any entry rather than a near one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

FAR = 0.5
TRIES = 1000  # before a length is given up
BLANK = "\n\n"


class Piece(NamedTuple):
    """Some text of a chain; what isn't `learned` is a slip, read but never imitated."""

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

    `checks` is the chance of a re-check (and of another after it), `slips` of one wrong result that
    a re-check then finds.
    """

    checks: float = 0.0
    slips: float = 0.0


PLAIN = Habits()


class Line(NamedTuple):
    """One computed result: `name` is found by `work`, which ends before the result."""

    name: str
    work: str
    result: str


@dataclass(frozen=True)
class Draft:
    """A problem before re-checks and slips."""

    question: str
    labels: list[str]  # what each thought begins with
    lines: list[list[Line]]  # of each thought
    asked: list[str]
    loose: set[str]  # asked names on whose last line no other depends
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
    """Characters are tokens; a blank line is one."""
    return len(text) - text.count(BLANK)


def _finish(rng: Random, kind: str, draft: Draft, habits: Habits) -> Problem:
    found = {line.name: line for lines in draft.lines for line in lines}  # the last of each name
    slip = None
    if draft.loose and rng.random() < habits.slips:
        slip = found[rng.choice(sorted(draft.loose))]
    wrong = str((int(slip.result) + rng.randint(1, 9)) % 10) if slip else ""
    thoughts = []
    for label, lines in zip(draft.labels, draft.lines, strict=True):
        thought = [Piece(label)]
        for index, line in enumerate(lines):
            thought.append(Piece(" " * bool(index) + line.work))
            thought.append(Piece(wrong, False) if line is slip else Piece(line.result))
        thoughts.append(tuple(thought))
    while slip or rng.random() < habits.checks:
        line = slip if slip and rng.random() < 0.7 else found[rng.choice(draft.asked)]
        verdict = f"was {wrong}" if line is slip else "ok"
        thoughts.append((Piece(f"check {line.work}{line.result} {verdict}"),))
        slip = None if line is slip else slip
    results = {name: line.result for name, line in found.items()}
    thoughts.append((Piece(draft.last(results)),))
    return Problem(kind, draft.question, tuple(thoughts), draft.answer(results))


def _compute(sign: str, x: int, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y}[sign] % 10


def _expression(rng: Random, names: list[str], second: list[str]) -> tuple[str, str, str]:
    """Operand, sign, operand; products only by 3, 7, 9, which lose nothing modulo 10."""
    if rng.random() < 0.2:
        return rng.choice(names), "*", rng.choice("379")
    sign = rng.choice("+-")
    if len(second) > 1 and rng.random() < 0.7:
        first = rng.choice(names)
        return first, sign, rng.choice([name for name in second if name != first])
    return rng.choice(names), sign, str(rng.randint(1, 9))


def _assign(name: str, expression: tuple[str, str, str], values: dict[str, int]) -> Line:
    x, sign, y = expression
    left = values[x]
    right = values[y] if y in values else int(y)
    values[name] = _compute(sign, left, right)
    return Line(name, f"{name}={x}{sign}{y}={left}{sign}{right}=", str(values[name]))


def _loop(rng: Random, tokens: int) -> Draft:
    sizes = [size for size in (1, 2, 3, 4) if size * 12 * 2 <= tokens] or [1]
    size = rng.choice(sizes)
    count = max(2, min(99, round(tokens / (size * 12 + 3))))
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(max(2, size), 5))
    values = {name: rng.randint(0, 9) for name in names}
    targets = rng.sample(names, size)
    body = [(target, _expression(rng, names, names)) for target in targets]
    asked = rng.choice(targets)
    start = " ".join(f"{name}={value}" for name, value in values.items())
    text = " ".join(f"{target}={''.join(expression)}" for target, expression in body)
    lines = [[_assign(target, e, values) for target, e in body] for _ in range(count)]
    after = [expression for _, expression in body[targets.index(asked) + 1 :]]
    return Draft(
        question=f"{start}; loop {count}: {text}; {asked}?",
        labels=[f"{left}: " for left in range(count, 0, -1)],
        lines=lines,
        asked=[asked],
        loose=set() if any(asked in expression for expression in after) else {asked},
        last=lambda found: f"{asked}={found[asked]}",
        answer=lambda found: found[asked],
    )


def _ledger(rng: Random, tokens: int) -> Draft:
    given = rng.randint(1, 3)
    count = max(given + 1, min(26, round((tokens - 12) / 12.5 + given * 0.6)))
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", count)
    values: dict[str, int] = {}
    lines, entries, used = [], [], set()
    for index, name in enumerate(names):
        if index < given:
            values[name] = rng.randint(0, 9)
            entries.append(f"{name}={values[name]}")
            lines.append([Line(name, f"{name}=", str(values[name]))])
            continue
        near = names[:index] if rng.random() < FAR else names[max(0, index - 3) : index]
        expression = _expression(rng, near, near)
        used |= {expression[0], expression[2]}
        entries.append(f"{name}={''.join(expression)}")
        lines.append([_assign(name, expression, values)])
    asked = rng.sample(names, min(count, rng.randint(1, 4)))
    return Draft(
        question=f"{' '.join(entries)}; {' '.join(asked)}?",
        labels=[""] * count,
        lines=lines,
        asked=asked,
        loose=set(asked) - used,
        last=lambda found: " ".join(f"{name}={found[name]}" for name in asked),
        answer=lambda found: " ".join(found[name] for name in asked),
    )


def _sum(rng: Random, tokens: int) -> Draft:
    count = max(2, min(26, round(tokens / 14)))
    names = rng.sample("abcdefghijklmnopqrstuvwxyz", count)
    columns, lines, carry = [], [], 0
    for name in names:
        x, y = rng.randint(0, 9), rng.randint(0, 9)
        columns.append(f"{name}:{x}+{y}")
        total = x + y + carry
        work = f"{name}:{x}+{y}+{carry}={total // 10}"
        carry = total // 10
        lines.append([Line(name, work, str(total % 10))])
    top = str(carry)
    return Draft(
        question=f"sum {' '.join(columns)}",
        labels=[""] * count,
        lines=lines,
        asked=names,
        loose=set(names),
        last=lambda found: " ".join(f"{name}{found[name]}" for name in names) + f" {top}",
        answer=lambda found: "".join(found[name] for name in names) + top,
    )


KINDS: dict[str, Callable[[Random, int], Draft]] = {"loop": _loop, "ledger": _ledger, "sum": _sum}
MIX = {"loop": 0.5, "ledger": 0.3, "sum": 0.2}
"""The default mix: the chance of each kind."""
