"""Chains by hand: thoughts, repetition, and where an answer stands."""

from __future__ import annotations

import random

import pytest

from bench.evaluation.anatomy import split_thoughts, take_apart
from bench.evaluation.mentions import first_mention


def test_thoughts_end_at_blank_lines() -> None:
    assert split_thoughts("one\nstill one\n\n\n\ntwo\n\n  \n\n") == ["one\nstill one", "two"]
    assert split_thoughts(" \n\n ") == []


def test_a_chain_by_hand() -> None:
    chain = "We add 3 and 5.\n\nThat is 9?\n\nNo, it is 8.\n\nwe add 3  and 5."
    anatomy = take_apart(chain, "9", "8")
    assert anatomy.thoughts == 4
    assert anatomy.repetition == 0.25
    assert anatomy.first_answer == chain.index("9") / len(chain)
    assert anatomy.first_right == chain.index("8") / len(chain)


def test_an_empty_chain() -> None:
    anatomy = take_apart("", None, "8")
    assert (anatomy.thoughts, anatomy.repetition) == (0, 0.0)
    assert (anatomy.first_answer, anatomy.first_right) == (None, None)


@pytest.mark.parametrize(
    ("thoughts", "repeated"),
    [
        (["a b c d e f", "a b c d x y"], 0),  # 2 of 6 trigrams
        (["a b c d e f", "a b c d e x"], 1),  # 3 of 5
        (["a b c d", "a b c x"], 0),  # 1 of 3
        (["a b c d e", "a b c d x", "a b c d"], 1),  # only the last: 2 of 3
        (["wait", "wait", "Wait", "wait no"], 2),
        (["no wait", "wait no", "no wait no"], 0),  # short ones are wholes
        (["a b c d e f g h", "x y z", "a b c d e f g i"], 1),  # not the one just before
    ],
)
def test_repetition_is_overlap_above_one_half(thoughts: list[str], repeated: int) -> None:
    assert take_apart("\n\n".join(thoughts), None, "8").repetition == repeated / len(thoughts)


def _grams(thought: str) -> set[tuple[str, ...]]:
    words = thought.split()
    return {tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))}


def _repeated_pairwise(thoughts: list[str]) -> int:
    """The definition, pair by pair."""
    grams = [_grams(thought) for thought in thoughts]
    return sum(
        any(len(grams[i] & grams[j]) / len(grams[i] | grams[j]) > 0.5 for j in range(i))
        for i in range(len(grams))
    )


def test_repetition_is_its_definition() -> None:
    generator = random.Random(0)
    thoughts = [" ".join(generator.choices("abc", k=generator.randint(1, 9))) for _ in range(150)]
    expected = _repeated_pairwise(thoughts)
    assert 30 < expected < 140
    assert take_apart("\n\n".join(thoughts), None, "8").repetition == expected / 150


def test_a_long_loop_with_a_counter() -> None:
    """Thousands of thoughts, no two equal, each like all before."""
    chain = "\n\n".join(f"step {i}: now we try the very next number once more" for i in range(2500))
    assert take_apart(chain, None, "none").repetition == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("8", "it is 8."),
        ("8", "8"),
        ("8", r"\boxed{8}"),
        ("8", "10-8 is two"),
        ("8", "8.00"),
        ("-8", "x=-8"),
        ("-8", "x = \u22128"),
        ("1000", "all 1,000 of them"),
        ("1,000", "all 1000 of them"),
        ("1,234,567", r"1{,}234{,}567"),
        ("1000", r"1,\!000"),
        ("$18", r"costs \$18"),
        ("50\\%", "about 50% of it"),
        ("0.5", "is .5"),
        ("1/2", "is 1/2."),
        (r"\frac{1}{2}", r"is $\dfrac { 1 }{2}$"),
        (r"$\left( 3, \frac{\pi}{2} \right)$", r"so (3,\frac{\pi}{2})"),
        (r"(3,\frac{\pi}{2})", r"so \left( 3, \frac{\pi}{2} \right)"),
        (r"\text{Evelyn}", "it's Evelyn"),
        ("blue car", "The Blue\ncar"),
        ("x + 1", "y=x+1"),
    ],
)
def test_found(answer: str, text: str) -> None:
    assert first_mention(text, answer) is not None


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("8", "18 80 8.5 3.8 x8 8th 1,008 8,000 0.8.1"),
        ("8", "x = -8"),
        ("8", "-8"),
        ("-8", "10-8"),
        ("1000", "1,0000 11,000 1,000,000"),
        ("1/2", "11/2 1/25 1/2.5 -1/2"),
        (r"\frac{1}{2}", r"3\frac{1}{2} -\frac{1}{2} \frac{1}{23}"),
        (r"\pi", r"\pie 2\pi"),
        ("B", "but b and ABBA"),
        ("blue car", "bluecar blue cars"),
        ("x+1", "2x+1 x+12 x+1.5"),
        ("8", ""),
        ("", "anything"),
        ("$$", "any $$ thing"),
    ],
)
def test_not_found(answer: str, text: str) -> None:
    assert first_mention(text, answer) is None


def test_the_first_place_counts_in_characters_of_the_text() -> None:
    text = "18, then $ 1,000 $, then 1000"
    assert first_mention(text, "1000") == text.index("1,000")
    text = r"3 or 4 makes \left( 3 , 4 \right), (3,4)"
    assert first_mention(text, "(3,4)") == text.index("( 3 , 4")


def test_a_search_for_words_is_linear() -> None:
    """A chain that loops on line feeds; backtracking over them would take minutes."""
    text = "New" + "\n" * 20_000
    assert first_mention(text, "New York City") is None
    assert first_mention(text + "York  City", "New York City") == 0
