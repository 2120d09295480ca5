"""What the abacus's questions mean: their answers, worked out from the text alone.

loop    "a=3 b=5; loop 2: a=a+b b=b*3; b?"  the body runs that often, modulo 10
ledger  "k=4 d=k+3 m=d-k; d k?"             entries modulo 10; the values asked for, in order
sum     "sum a:4+7 b:8+6"                   by columns, the lowest first, as the answer is
"""

from __future__ import annotations

import re

FORMS = "'a=3 b=5; loop 2: a=a+b b=b*3; b?', 'k=4 d=k+3; d k?' or 'sum a:4+7 b:8+6'"

_LOOP = re.compile(
    r"(?P<given>[^;:]+); loop (?P<times>\d{1,2}): (?P<body>[^;:]+); (?P<asked>[a-z])\?"
)
_LEDGER = re.compile(r"(?P<entries>[^;:]+); (?P<asked>[a-z](?: [a-z])*)\?")
_SUM = re.compile(r"sum (?P<columns>[a-z]:\d\+\d(?: [a-z]:\d\+\d)*)")
_ASSIGNMENT = re.compile(r"(?P<name>[a-z])=(?P<x>[a-z0-9])(?:(?P<sign>[-+*])(?P<y>[a-z0-9]))?")


def answer_of(question: str) -> str:
    """The exact answer. ValueError: not in the notation, or a name without a value."""
    if loop := _LOOP.fullmatch(question):
        values = _run(loop["given"], {})
        for _ in range(int(loop["times"])):
            _run(loop["body"], values)
        return _value(loop["asked"], values)
    if ledger := _LEDGER.fullmatch(question):
        values = _run(ledger["entries"], {})
        return " ".join(_value(name, values) for name in ledger["asked"].split())
    if columns := _SUM.fullmatch(question):
        return _sum(columns["columns"].split())
    raise ValueError(f"{question!r} isn't a question that the abacus knows: {FORMS}")


def _run(text: str, values: dict[str, str]) -> dict[str, str]:
    """Assignments, one after the other, into `values`."""
    for part in text.split(" "):
        assignment = _ASSIGNMENT.fullmatch(part)
        if assignment is None:
            raise ValueError(f"{part!r} isn't an assignment of single digits, such as a=b+3")
        x, y = (_value(assignment[side] or "0", values) for side in ("x", "y"))
        values[assignment["name"]] = _compute(int(x), assignment["sign"] or "+", int(y))
    return values


def _compute(x: int, sign: str, y: int) -> str:
    return str({"+": x + y, "-": x - y, "*": x * y}[sign] % 10)


def _value(name: str, values: dict[str, str]) -> str:
    if not name.isdigit() and name not in values:
        raise ValueError(f"{name} is used before it has a value")
    return values.get(name, name)


def _sum(columns: list[str]) -> str:
    digits, carry = "", 0
    for column in columns:
        total = int(column[2]) + int(column[4]) + carry
        digits, carry = digits + str(total % 10), total // 10
    return digits + str(carry)
