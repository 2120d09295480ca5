"""Where an answer first stands in a text.

A text search, not understanding: an answer that is only implied isn't found, and a number that
happens to equal the answer is. Numbers compare by value, so "8" isn't in "18", "80", "8.5", "x8"
or "-8", but "1,000", "1{,}000" and "1000.0" are one. Anything else compares sign by sign between
boundaries; LaTeX without white space, `$`, `\\left`, `\\right`, `\\!` and `\\,`, and with all
spellings of `\\frac` one.
"""

from __future__ import annotations

import re
from decimal import Decimal
from itertools import pairwise

_SEPARATOR = r"(?:,|\{,\}|\\,|,\\!)"  # of thousands
_MINUS = r"[-\u2212]"
_SIGN = rf"(?<![\w)\]}}]){_MINUS}"  # after an operand a minus subtracts
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})?(?<!\w)(?<!\d\.)"
    rf"(?P<digits>(?>(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+))(?!\w)",
    re.ASCII,
)
_IGNORED = r"(?:\s|\$|\\(?:left|right)(?![a-zA-Z])|\\[!,])"
_TOKEN = re.compile(r"(?<=\w)\s+(?=\w)|\\[a-zA-Z]+|\\.|\S")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")


def first_mention(text: str, answer: str) -> int | None:
    """The character of `text` at which `answer` first stands."""
    bare = answer.strip().strip("$").strip()
    wrapped = _WRAPPED.fullmatch(bare)
    bare = wrapped.group(1).strip() if wrapped else bare
    number = _NUMBER.fullmatch(bare.removeprefix("\\$").removesuffix("%").removesuffix("\\"))
    if number is not None:
        wanted = _value(number)
        return next((m.start() for m in _NUMBER.finditer(text) if _value(m) == wanted), None)
    pattern = _pattern(bare)
    found = None if pattern is None else pattern.search(text)
    return None if found is None else found.start()


def _value(number: re.Match[str]) -> Decimal:
    value = Decimal(re.sub(r"[^\d.]", "", number["digits"], flags=re.ASCII))
    return -value if number["sign"] else value


def _pattern(answer: str) -> re.Pattern[str] | None:
    latex = "\\" in answer
    bare = re.sub(_IGNORED, "", answer) if latex else answer
    tokens = _TOKEN.findall(bare)
    if not tokens:
        return None
    words = not latex and len(bare) > 1 and bare.replace(" ", "").isalpha()
    body = _token_pattern(tokens[0])
    for last, token in pairwise(tokens):  # never two repeats of white space side by side
        apart = "" if last.isspace() or token.isspace() else f"{_IGNORED}*+"
        body += apart + _token_pattern(token)
    before, after = _before(tokens[0], words), _after(tokens[-1])
    return re.compile(before + body + after, re.IGNORECASE if words else 0)


def _token_pattern(token: str) -> str:
    if token.isspace():
        return r"\s++"
    if re.fullmatch(_MINUS, token):
        return _MINUS
    if token in (r"\frac", r"\dfrac", r"\tfrac"):
        return r"\\[dt]?frac"
    return re.escape(token) + ("(?![a-zA-Z])" if len(token) > 2 else "")


def _before(token: str, words: bool) -> str:
    if re.fullmatch(_MINUS, token):
        return r"(?<![\w)\]}])"
    edge = r"(?<!\w)(?<!\d\.)" if token[0].isalnum() or token[0] == "\\" else ""
    no_sign = rf"(?<![^\w)\]}}]{_MINUS})(?<!\A{_MINUS})"
    return edge if words else edge + no_sign


def _after(token: str) -> str:
    if not token[-1].isalnum():
        return ""
    return r"(?!\w)(?!\.\d)(?!,\d{3}(?!\d))" if token[-1].isdigit() else r"(?!\w)"
