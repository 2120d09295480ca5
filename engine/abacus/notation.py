"""What the abacus's questions mean: their answers, worked out from the text alone.

All is of single digits, modulo 10; "c:a+b" sets c to a + b.

    loop    "a=3 b=5; loop 2: a:a+b b:b*3; b?"  the statements run that often
    ledger  "k=4 d:k+3 m:d-k; m k?"             the values of the names, in the order asked
    sum     "sum a:4+7 b:8+6; b a?"             by columns, the lowest first: digits of the sum
"""

from __future__ import annotations

import re

FORMS = "'a=3 b=5; loop 2: a:a+b b:b*3; b?', 'k=4 d:k+3; d k?' or 'sum a:4+7 b:8+6; b a?'"

_LOOP = re.compile(
    r"(?P<given>[^;:]+); loop (?P<rounds>[1-9]\d?): (?P<body>[^;]+); (?P<asked>[a-z])\?"
)
_SUM = re.compile(r"sum (?P<columns>[a-z]:\d\+\d(?: [a-z]:\d\+\d)*); (?P<asked>[a-z](?: [a-z])*)\?")
_LEDGER = re.compile(r"(?P<entries>[^;]+); (?P<asked>[a-z](?: [a-z])*)\?")
_GIVEN = re.compile(r"(?P<name>[a-z])=(?P<x>\d)")
_STATEMENT = re.compile(r"(?P<name>[a-z]):(?P<x>[a-z0-9])(?P<sign>[-+*])(?P<y>[a-z0-9])")

Values = dict[str, int]


def answer_of(question: str) -> str:
    """The exact answer. ValueError: not in the notation, or a name without a value."""
    if loop := _LOOP.fullmatch(question):
        return _loop(loop)
    if columns := _SUM.fullmatch(question):
        return _told(columns["asked"], _sum(columns["columns"].split()))
    if ledger := _LEDGER.fullmatch(question):
        return _told(ledger["asked"], _run(ledger["entries"], {}))
    raise ValueError(f"{question!r} isn't a question that the abacus knows: {FORMS}")


def _loop(loop: re.Match[str]) -> str:
    values = _run(loop["given"], {})
    for _ in range(int(loop["rounds"])):
        _run(loop["body"], values)
    return _told(loop["asked"], values)


def _run(text: str, values: Values) -> Values:
    """Statements, one after the other, into `values`."""
    for part in text.split(" "):
        if given := _GIVEN.fullmatch(part):
            values[given["name"]] = int(given["x"])
        elif statement := _STATEMENT.fullmatch(part):
            x, y = (_value(statement[side], values) for side in ("x", "y"))
            values[statement["name"]] = _compute(x, statement["sign"], y)
        else:
            raise ValueError(f"{part!r} is no statement of single digits, such as a=3 or c:a+b")
    return values


def _compute(x: int, sign: str, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y}[sign] % 10


def _value(name: str, values: Values) -> int:
    if name.isdigit():
        return int(name)
    if name not in values:
        raise ValueError(f"{name} is used before it has a value")
    return values[name]


def _sum(columns: list[str]) -> Values:
    digits, carry = {}, 0
    for column in columns:
        carry, digits[column[0]] = divmod(int(column[2]) + int(column[4]) + carry, 10)
    return digits


def _told(asked: str, values: Values) -> str:
    return " ".join(str(_value(name, values)) for name in asked.split())
