r"""Verdicts on answers: pure functions of a text and its problem, run by `grading.Grading`.

What is graded is the last `\boxed{...}` that is closed and isn't blank (of `exact`, the whole
text); without one it is `unanswered`. What fails raises, and the caller says `grader_error`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from bench.evaluation.records import Problem, Verdicted

Grader = Callable[[str, Problem], Verdicted]

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(?P<token>[-+]?\.?\d[^\s{}$\\]*)")


def extract_boxed(text: str) -> str | None:
    r"""The content of the last box that is closed and isn't blank: `\boxed{}`, `\fbox{}` with
    balanced braces (escaped ones don't count), or `\boxed 5` (numbers only: models write of "the
    \boxed notation"). A box that a token limit cut open is no answer; one inside another wins.
    Linear in the text, whatever a looping model writes."""
    best: tuple[int, str] | None = None
    opened: list[int] = []  # where a box's content starts; -1: any other brace
    for match in _BRACES.finditer(text):
        if match["box"]:
            opened.append(match.end())
        elif match["open"]:
            opened.append(-1)
        elif match["close"] and opened:
            start = opened.pop()
            content = text[start : match.start()].strip() if start >= 0 else ""
            if content and (best is None or start > best[0]):
                best = start, content
    for match in _BARE_BOX.finditer(text):
        content = match["token"].rstrip(".,;:")
        if content and (best is None or match.start("token") > best[0]):
            best = match.start("token"), content
    return best[1] if best else None


_WORDS = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname|underline|emph)\s*\{([^{}]*)\}"
)
_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,;: ]|\{,\}|[~\u00a0\u202f])(?=\d{3}(?!\d))")


def _latex_thousands(text: str) -> str:
    r"""`1{,}000`, `1\,000` and `1,\!000` as `1,000`."""
    return _THOUSANDS.sub(",", text.replace(r"\!", ""))


def _without_words(text: str) -> str:
    r"""`18\text{ eggs}` as `18 eggs`."""
    found = 1
    while found:
        text, found = _WORDS.subn(r" \1 ", text)
    return text


# -- number ----------------------------------------------------------------------------------------

_LONGEST = 500  # characters; a longer box holds no final number, and int() refuses 4300 digits
_EQUALS = re.compile(r"=|\\approx|≈")
_NOT_READ = re.compile(
    r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\\\|\\q?quad|\\[,;: ]|[~\u00a0\u202f]"
)
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_TIMES_TEN = re.compile(r"\s?(?:\\times|\\cdot|[*\u00d7\u00b7])\s?10\s?\^\s?\{?\s?([-+]?\d+)\s?\}?")
_UNIT_POWER = re.compile(r"(?<=[A-Za-z])\s?\^\s?\{?-?\d\}?|\^\s?\{?\s?\\circ\s?\}?")
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
_NUMBER = re.compile(
    rf"(?<![\w./-])(?P<sign>[-+]?)\s?[$€£¥₹]?\s?(?P<late_sign>[-+]?)\s?"
    rf"(?:(?P<whole>\d+)\s(?=\d+\s?/\s?\d))?"
    rf"(?P<top>{_UNSIGNED})(?:\s?/\s?(?P<bottom>[-+]?{_UNSIGNED}))?"
)
_MORE = re.compile(r"[\d\\^*+!]")  # another number, or an expression that nobody worked out


def read_number(text: str) -> Fraction | None:
    r"""The one number of a final answer, exactly; None if there is none or more than one.

    Read: signs, thousands separators (`1,000`, `1{,}000`, `1\,000`), decimals, `1/2`,
    `\frac{1}{2}`, mixed numbers, `6 \times 10^{3}`. Currency signs, units, words and `%` don't
    count: `5\%` is 5. Of equations it is what stands after the last `=` or `\approx`; of
    `16-3-4`, `5 or 6`, `5 h 30 min`, `2^3` and `\sqrt{2}` it is None.
    """
    if len(text) > _LONGEST:
        return None
    text = _EQUALS.split(_latex_thousands(text))[-1]
    text = _without_words(text.replace(r"\$", "$").replace(r"\%", "%"))
    text = re.sub("[\u2212\u2013]", "-", _NOT_READ.sub(" ", text))
    text = _TIMES_TEN.sub(r"e\1", " ".join(text.split()))
    text = _UNIT_POWER.sub("", _FRACTION.sub(r" \1\2/\3\4 ", text))
    text = " ".join(text.split())
    found = list(_NUMBER.finditer(text))
    if len(found) != 1 or _MORE.search(text[: found[0].start()] + text[found[0].end() :]):
        return None
    return _fraction(found[0])


def _fraction(match: re.Match[str]) -> Fraction | None:
    top = Fraction(match["top"].replace(",", ""))
    bottom = Fraction((match["bottom"] or "1").replace(",", ""))
    if not bottom:
        return None
    value = int(match["whole"] or 0) + top / bottom
    return -value if "-" in (match["sign"], match["late_sign"]) else value


def number(text: str, problem: Problem) -> Verdicted:
    """Right iff the boxed number equals the expected one exactly; a box without one number is
    wrong."""
    answer = extract_boxed(text)
    if answer is None:
        return Verdicted("unanswered", None)
    expected = read_number(problem.answer)
    if expected is None:
        raise ValueError(f"the expected answer {problem.answer!r} isn't one number")
    return _verdict(read_number(answer) == expected, answer)


# -- math ------------------------------------------------------------------------------------------

_CHOICE = re.compile(r"\(([A-Z])\)")
_CHOSEN = re.compile(r"\(?([A-Z])(?:[).:]|$)")
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_LAYOUT = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\q?quad|\\[,;:! ]|[\s~$]")


def math(text: str, problem: Problem) -> Verdicted:
    """Right iff math-verify, with its own defaults, finds the box equal to the expected answer.

    Where it can't read the expected answer, the two must be the same but for layout. It ignores
    units, degrees, `%` and the left side of `x = 5`, takes `1, 2` for the pair `(1, 2)`, and rounds
    decimals (not fractions) at the 6th place. Two things are ours: `(B) 5` chooses `(B)`, and
    numbers of different bases (`52_8`, `52_9`) differ.
    """
    answer = extract_boxed(text)
    if answer is None:
        return Verdicted("unanswered", None)
    ours, theirs = _without_layout(problem.answer), _without_layout(answer)
    if ours == theirs:
        return Verdicted("right", answer)
    if (choice := _CHOICE.fullmatch(ours)) and (chosen := _CHOSEN.match(theirs)):
        return _verdict(choice[1] == chosen[1], answer)
    if (base := _BASE.search(ours)) and (other := _BASE.search(theirs)) and base[1] != other[1]:
        return Verdicted("wrong", answer)
    parse, verify = _math_verify()
    expected = parse(problem.answer)
    if all(isinstance(each, str) for each in expected):
        return Verdicted("wrong", answer)
    return _verdict(verify(expected, parse(answer)), answer)


def _without_layout(text: str) -> str:
    text = _without_words(_latex_thousands(text)).replace(r"\dfrac", r"\frac")
    return _LAYOUT.sub("", text).rstrip(".")


@cache
def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """`parse` and `verify`, which raise what goes wrong in them (their default is "not equal").

    Their time limits, alarms of the whole process, are off: the worker has one. Each logs once
    that they are.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parse(latex: str) -> list[Any]:
        boxed = rf"\boxed{{{_latex_thousands(latex)}}}"
        return list(math_verify.parse(boxed, parsing_timeout=None, raise_on_error=True))

    def verify(expected: list[Any], answer: list[Any]) -> bool:
        return bool(math_verify.verify(expected, answer, timeout_seconds=None, raise_on_error=True))

    return parse, verify


# -- reasoning-gym ---------------------------------------------------------------------------------

_PLAIN = (
    (re.compile(r"\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\\\"), "\n"),
    (re.compile(r"\\([$%&#_{}])"), r"\1"),
    (re.compile(r"[ \t]+"), " "),
)


def reasoning_gym(text: str, problem: Problem) -> Verdicted:
    r"""Right iff the generator's own scorer gives 1.0 to the box, or to the box without its LaTeX
    (`\text{yes}`, `3 \times 4`). Some scorers give partial credit: less than 1.0 is wrong here."""
    answer = extract_boxed(text)
    if answer is None:
        return Verdicted("unanswered", None)
    if problem.entry is None:
        raise ValueError("a reasoning-gym problem needs the entry that its generator made")
    name, params, entry = (problem.entry[key] for key in ("name", "params", "entry"))
    score = _scorer(name, json.dumps(params, sort_keys=True))
    right = any(score(each, entry) >= 1.0 for each in dict.fromkeys((answer, _plain(answer))))
    return _verdict(right, answer)


def _plain(answer: str) -> str:
    answer = _without_words(_latex_thousands(answer))
    for pattern, replacement in _PLAIN:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


@cache
def _scorer(name: str, params: str) -> Callable[[str, Mapping[str, Any]], float]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))
    return dataset.score_answer  # type: ignore[no-any-return]


# -- exact -----------------------------------------------------------------------------------------


def exact(text: str, problem: Problem) -> Verdicted:
    """Right iff the whole answer, without the space around it, is the expected one."""
    answer = text.strip()
    if not answer:
        return Verdicted("unanswered", None)
    return _verdict(answer == problem.answer, answer)


GRADERS: dict[str, Grader] = {
    "number": number,
    "math": math,
    "reasoning-gym": reasoning_gym,
    "exact": exact,
}


def grade(text: str, problem: Problem) -> Verdicted:
    """The verdict of the problem's own grader."""
    return GRADERS[problem.grader](text, problem)


def _verdict(right: bool, answer: str) -> Verdicted:
    return Verdicted("right" if right else "wrong", answer)
