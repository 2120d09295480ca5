"""What is right: many spellings of an answer, and wrong ones that look like it."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest

from bench.evaluation.graders import GRADERS, extract_boxed, grade, read_number
from bench.evaluation.problems import load
from bench.evaluation.records import Problem


def verdict(grader: str, expected: str, answer: str) -> str:
    problem = Problem(id="p", task="t", question="?", answer=expected, grader=grader)
    return grade(rf"So it is \boxed{{{answer}}}.", problem).verdict


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\fbox{ 5 }", "5"),
        (r"\boxed 5.", "5"),
        (r"$\boxed -5$", "-5"),
        (r"\boxed{5}, in the \boxed notation", "5"),
        (r"First \boxed{4}, no, \boxed{5}", "5"),
        (r"\boxed{4} or \boxed 5", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"a} \boxed{5} {", "5"),
        (r"\boxed{ and then \boxed{5}", "5"),
        ("\\boxed{\n1 2\n3 4\n}", "1 2\n3 4"),
        (r"\boxed{5}. It is in \boxed{}", "5"),
        (r"\boxed{5} but then \boxed{6", "5"),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{ }", None),
        ("It is 5.", None),
    ],
)
def test_box(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


def test_a_loop_of_open_boxes_is_read_in_one_pass() -> None:
    assert extract_boxed(r"\boxed{" * 100_000 + "5}") == "5"


@pytest.mark.parametrize("grader", sorted(GRADERS.keys() - {"exact"}))
def test_no_box_is_no_answer(grader: str) -> None:
    problem = Problem(id="p", task="t", question="?", answer="18", grader=grader)
    assert grade(r"It is 18. \boxed{18", problem) == ("unanswered", None, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", "18"),
        ("18.00", "18"),
        ("18.", "18"),
        (r"\$18", "18"),
        ("-$18", "-18"),
        (r"\$-18", "-18"),
        ("\u221218", "-18"),
        ("18 dollars", "18"),
        (r"18\text{ eggs}", "18"),
        (r"\text{\$}18 \text{ per day}", "18"),
        (r"\textbf{\text{18}}", "18"),
        (r"18\ \text{cm}^2", "18"),
        ("18 km/h", "18"),
        (r"18^\circ", "18"),
        (r"5\%", "5"),
        ("1,000", "1000"),
        ("1{,}000{,}000", "1000000"),
        (r"1\,000", "1000"),
        (r"1,\!000.5", "2001/2"),
        ("1.000", "1"),
        (".5", "1/2"),
        ("-1/2", "-1/2"),
        (r"\frac{1}{2}", "1/2"),
        (r"-\dfrac12", "-1/2"),
        (r"\frac{-1}{2}", "-1/2"),
        (r"1\frac{1}{2}", "3/2"),
        ("3 1/2 cups", "7/2"),
        (r"6.5 \times 10^{-3}", "13/2000"),
        ("1e3", "1000"),
        ("3 + 4 = 7", "7"),
        (r"x \approx 3.33", "333/100"),
        ("16-3-4", None),
        ("10+10", None),
        ("5 or 6", None),
        ("5 h 30 min", None),
        ("1,5", None),
        ("2^3", None),
        (r"\sqrt{16}", None),
        (r"2\pi", None),
        (r"\frac{x}{2}", None),
        (r"\frac{1}{0}", None),
        ("x-3", None),
        ("eighteen", None),
        ("9" * 5000, None),
        ("1e99999", None),
    ],
)
def test_read_number(text: str, value: str | None) -> None:
    assert read_number(text) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("expected", "answer", "verdicted"),
    [
        ("1,000", r"\$1000.00", "right"),
        ("0.5", r"\frac{3}{6}", "right"),
        ("0.333", r"\frac{1}{3}", "wrong"),
        ("1000", "1.000", "wrong"),
        ("18", "-18", "wrong"),
        ("18", "eighteen", "wrong"),
    ],
)
def test_number(expected: str, answer: str, verdicted: str) -> None:
    assert verdict("number", expected, answer) == verdicted


def test_an_expected_answer_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the expected answer 'many' isn't one number"):
        verdict("number", "many", "18")


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        (r"\frac{1}{2}", "0.5"),
        (r"\frac12", r"\dfrac{1}{2}"),
        (r"1\frac{4}{5}", "9/5"),
        (r"3\sqrt{13}", r"\sqrt{117}"),
        ("(a+5)(b+2)", "ab + 2a + 5b + 10"),
        (r"\cot x", r"\frac{\cos x}{\sin x}"),
        (r"10,\!080", "10080"),
        ("26000", r"26\,000"),
        (r"\$36", r"36 \text{ dollars}"),
        ("6", r"6\text{ cm}^2"),
        (r"50\%", "50"),
        (r"145^\circ", r"145 \text{ degrees}"),
        ("5", "x = 5"),
        ("y = 2x + 3", "y=3+2x"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
        ("3, 5, 7", r"\{7, 5, 3\}"),
        (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
        (r"(0,9) \cup (9,36)", r"x \in (0,9)\cup(9,36)"),
        (r"\begin{pmatrix} 1/5 \\ -2 \end{pmatrix}", r"\begin{bmatrix} 0.2 \\ -2 \end{bmatrix}"),
        (r"\text{even}", "even"),
        (r"\text{Evelyn}", r"\textbf{evelyn}"),
        (r"\text{(B)}", "B"),
        (r"\text{(B)}", r"\textbf{(B)}\ 5"),
        ("52_8", "52_{8}"),
        (r"???", r"\text{???}"),  # nothing that math-verify can read
    ],
)
def test_math_right(expected: str, answer: str) -> None:
    assert verdict("math", expected, answer) == "right"


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("1/2", "2/1"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "(2,1)"),
        ("12", "1, 2"),
        ("1,000", "1.000"),
        ("-3", "3"),
        (r"\frac{1}{3}", "0.33"),
        (r"1\frac{4}{5}", "4/5"),
        (r"1 \pm \sqrt{19}", r"1+\sqrt{19}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
        ("y = 2x + 3", "y = 2x + 4"),
        (r"\text{even}", r"\text{odd}"),
        (r"\text{(B)}", r"\text{(C)}"),
        ("52_8", "52_9"),
        ("52_8", "42"),
        (r"???", "??"),
        ("5", r"\lim_{x\to 0}"),
    ],
)
def test_math_wrong(expected: str, answer: str) -> None:
    assert verdict("math", expected, answer) == "wrong"


@pytest.mark.parametrize(
    "task", ["chain_sum", "countdown", "word_sorting", "knights_knaves", "leg_counting"]
)
def test_reasoning_gym(task: str) -> None:
    for problem in load(f"reasoning-gym:{task}", None, 2, seed=3):
        read_back = replace(problem, entry=json.loads(json.dumps(problem.entry)))
        for answer in (problem.answer, rf"\text{{{problem.answer}}}"):
            assert grade(rf"\boxed{{{answer}}}", read_back).verdict == "right"
        assert grade(r"\boxed{0}", read_back).verdict == "wrong"


def countdown(answer: str) -> str:
    """6, 7 and 8 make 34: any expression of all three will do."""
    entry = {"answer": "6 * 7 - 8", "metadata": {"numbers": [6, 7, 8], "target": 34}}
    problem = Problem(
        id="p",
        task="t",
        question="?",
        answer="6 * 7 - 8",
        grader="reasoning-gym",
        entry={"name": "countdown", "params": {}, "entry": entry},
    )
    return grade(rf"\boxed{{{answer}}}", problem).verdict


@pytest.mark.parametrize("answer", ["6 * 7 - 8", "7*6 - 8", r"\left(7 \times 6\right) - 8"])
def test_a_generators_own_scorer_decides(answer: str) -> None:
    assert countdown(answer) == "right"


@pytest.mark.parametrize("answer", ["6 * 8 - 7", "34", "x"])
def test_partial_credit_is_wrong(answer: str) -> None:
    assert countdown(answer) == "wrong"


def test_a_scorer_needs_its_entry() -> None:
    with pytest.raises(ValueError, match="needs the entry"):
        verdict("reasoning-gym", "1", "1")


@pytest.mark.parametrize(
    ("text", "found"),
    [("\n\n3 7\n", "right"), ("37", "wrong"), ("3 7 4", "wrong"), (" \n", "unanswered")],
)
def test_exact_takes_the_whole_answer(text: str, found: str) -> None:
    problem = Problem(id="p", task="t", question="?", answer="3 7", grader="exact")
    assert grade(text, problem).verdict == found
