"""Where problems come from: files, data sets, generators, and what is refused with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.evaluation.problems import load, parse_task
from bench.evaluation.prompts import INSTRUCTION, messages, plain
from engine.abacus.notation import answer_of

ROWS = [{"id": f"p{i}", "question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(4)]


def write(path: Path, rows: list[Any]) -> str:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_the_first_lines_in_their_order(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", ROWS)
    problems = load("gsm8k", source, 2, seed=0)
    assert [(p.id, p.question, p.answer) for p in problems] == [
        ("p0", "0 + 0?", "0"),
        ("p1", "1 + 1?", "2"),
    ]
    assert {(p.task, p.grader, p.entry) for p in problems} == {("gsm8k", "number", None)}
    assert problems == load("gsm8k", source, None, seed=5)[:2]


@pytest.mark.parametrize(
    ("task", "row", "question", "answer"),
    [
        ("gsm8k", {"question": "How many?", "answer": "2+16=18\n#### 18"}, "How many?", "18"),
        ("gsm8k", {"question": "How many?", "answer": 18}, "How many?", "18"),
        (
            "math",
            {"problem": "Which?", "solution": r"\boxed{1}, so $\boxed{\frac{1}{2}}$."},
            "Which?",
            r"\frac{1}{2}",
        ),
        ("math", {"problem": "Which?", "solution": r"\boxed{1}", "answer": "1.0"}, "Which?", "1.0"),
    ],
)
def test_original_columns(
    tmp_path: Path, task: str, row: dict[str, Any], question: str, answer: str
) -> None:
    (problem,) = load(task, write(tmp_path / "a.jsonl", ["", row]), None, seed=0)
    assert (problem.id, problem.question, problem.answer) == (f"{task}-2", question, answer)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "holds no problems"),
        ([ROWS[0], ROWS[1], ROWS[0]], r"a\.jsonl:3: the id 'p0' is there twice"),
        ([ROWS[0], "{"], r"a\.jsonl:2: isn't JSON"),
        (["[1]"], r"a\.jsonl:1: must be a JSON object"),
        ([{"question": "?"}], r"a\.jsonl:1: needs a text as answer"),
        ([{"answer": "1"}], r"a\.jsonl:1: needs a text as question or problem"),
        ([{"question": " ", "answer": "1"}], r"a\.jsonl:1: needs a text as question"),
        ([{"question": "?", "answer": "many"}], r"a\.jsonl:1: the answer 'many' isn't one number"),
    ],
)
def test_bad_files(tmp_path: Path, rows: list[Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load("gsm8k", write(tmp_path / "a.jsonl", rows), None, seed=0)


def test_a_solution_without_a_box_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"problem": "?", "solution": r"It is \boxed{5"}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: its solution has no \\boxed\{\}"):
        load("math", source, None, seed=0)


def test_bad_bytes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ValueError, match="isn't text: give the folder"):
        load("gsm8k", str(tmp_path / "a.jsonl"), None, seed=0)


@pytest.mark.parametrize(
    ("task", "source", "limit", "error"),
    [
        ("gsm8k", "a.jsonl", 0, "limit must be at least 1, not 0"),
        ("gsm8k", "nowhere.jsonl", 1, "there is no file nowhere.jsonl"),
        ("gsm8k", None, 1, "gsm8k needs a source"),
        (
            "gsm9k",
            "a.jsonl",
            1,
            "there is no task 'gsm9k'; known: gsm8k, math, abacus, reasoning-gym:NAME",
        ),
        ("reasoning-gym:chain_sum", "a.jsonl", 1, "takes no source"),
        ("reasoning-gym:chain_sum", None, None, "never ends: give a limit"),
        ("reasoning-gym", None, 1, "there is no task"),
    ],
)
def test_bad_calls(task: str, source: str | None, limit: int | None, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load(task, source, limit, seed=0)


def test_generators_take_parameters_and_a_seed() -> None:
    task = "reasoning-gym:chain_sum(min_terms=3, max_terms=3, allow_negation=False)"
    problems = load(task, None, 3, seed=1)
    assert [p.id for p in problems] == ["chain_sum-1-0", "chain_sum-1-1", "chain_sum-1-2"]
    assert {p.task for p in problems} == {task}
    assert {p.entry["params"]["min_terms"] for p in problems if p.entry} == {3}
    assert {sum(c in "+-" for c in p.question.split(":")[-1]) for p in problems} == {2}
    assert problems[0].question != load(task, None, 1, seed=2)[0].question


def test_a_problem_that_many_answers_solve_has_no_expected_one() -> None:
    assert load("reasoning-gym:graph_color", None, 1, seed=0)[0].answer == ""


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("chainsum", r"no generator 'chainsum' of its \d+; close to it: chain_sum"),
        ("chain_sum(terms=3)", "chain_sum has no parameter terms; known: min_terms"),
        ("chain_sum(seed=3)", "seed follows from the run's own seed"),
        ("chain_sum(min_terms=x)", "the value of min_terms must be a literal"),
        ("chain_sum(min_terms=5, max_terms=3)", "reasoning-gym:chain_sum: "),
        ("chain_sum(3)", "isn't a generator: write NAME"),
        ("chain_sum(**{})", "isn't a generator: write NAME"),
        ("chain sum", "isn't a generator: write NAME"),
        ("", "isn't a generator: write NAME"),
    ],
)
def test_bad_generators(call: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_task(f"reasoning-gym:{call}")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set's folder with two splits, and no cache outside of the test."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for split, rows in (("train", ROWS[:1]), ("test", ROWS[1:])):
        write(folder / f"{split}.jsonl", rows)
    return folder


def test_data_sets(folder: Path) -> None:
    for split, ids in (("", ["p1", "p2"]), (":train", ["p0"]), ("@default:test", ["p1", "p2"])):
        problems = load("gsm8k", f"{folder}{split}", 2, seed=0)
        assert [p.id for p in problems] == ids
    with pytest.raises(ValueError, match="has no split 'dev'; known: train, test"):
        load("gsm8k", f"{folder}:dev", None, seed=0)
    with pytest.raises(ValueError, match="can't load the data set"):
        load("gsm8k", f"{folder}@hard", None, seed=0)


def test_a_folders_name_may_hold_the_signs(folder: Path) -> None:
    named = folder.rename(folder.with_name("set@home:now"))
    assert load("gsm8k", str(named), 1, seed=0)[0].id == "p1"


def test_a_folder_without_data(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match="can't load the data set"):
        load("gsm8k", str(folder / "empty"), None, seed=0)


def test_prompts() -> None:
    assert messages("Q?") == [{"role": "user", "content": f"Q?\n\n{INSTRUCTION}"}]
    assert messages("Q?", instruction="", system="S") == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q?"},
    ]
    assert plain(messages("Q?", instruction="Box it.", system="S")) == (
        "S\n\nQuestion: Q?\n\nBox it.\n\nAnswer:"
    )


def test_a_scorer_that_takes_anything_is_refused() -> None:
    with pytest.raises(ValueError, match="can't be graded: its scorer takes anything"):
        load("reasoning-gym:game_of_life_halting", None, 5, seed=0)


def test_abacus_makes_fresh_problems_for_each_seed() -> None:
    task = "abacus(min_tokens=50, max_tokens=90, kind='loop')"
    problems = load(task, None, 20, seed=3)
    assert problems == load(task, None, 30, seed=3)[:20]
    others = load(task, None, 20, seed=4)
    assert not {p.question for p in problems} & {p.question for p in others}
    assert {(p.task, p.grader, p.instruction) for p in problems} == {(task, "exact", "")}
    assert all("; loop " in p.question and p.answer == answer_of(p.question) for p in problems)
    assert len({p.id.split("-")[0] for p in load("abacus", None, 40, seed=0)}) == 3


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("abacus(length=3)", "abacus has no parameter length; known: min_tokens, max_tokens, kind"),
        ("abacus(kind='maze')", "kind must be of loop, ledger, sum, not 'maze'"),
        ("abacus(min_tokens=0)", "min_tokens must be a positive integer, not 0"),
        ("abacus(min_tokens=500)", "min_tokens 500 is above max_tokens 400"),
        ("abacus(50)", "write NAME or NAME"),
        ("abacus:loop", "there is no task"),
    ],
)
def test_bad_abacus_tasks(call: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_task(call)
