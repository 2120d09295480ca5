"""Problems of a task: from a JSONL file, a Hugging Face data set, or a generator.

A source is a `.jsonl` file, a folder of data files, or a data set of the hub, the last two
optionally followed by a configuration and a split: `openai/gsm8k@main:test`. Always the first
`limit` problems in their own order, so that two runs ask the same.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.abacus.task import ABACUS, Abacus
from bench.evaluation.graders import extract_boxed, read_number
from bench.evaluation.gym import GYM, Gym
from bench.evaluation.records import Problem

GRADER = {"gsm8k": "number", "math": "math"}
"""The tasks that are read from a source, with their grader."""


class Generator(Protocol):
    """Makes problems."""

    def make(self, task: str, limit: int, seed: int) -> list[Problem]:
        """The first `limit` of a seed. ValueError: none can be made so."""
        ...


class Task(NamedTuple):
    """A task's parsed name."""

    name: str  # as it was written: what samples and tables call it
    generator: Generator | None  # None: read from a source


class Row(NamedTuple):
    """A line of a file or of a data set."""

    where: str  # for messages
    number: int  # from 1
    columns: Mapping[str, Any]


def parse_task(text: str) -> Task:
    """`gsm8k`, `math`, `abacus`, `reasoning-gym:NAME`; the last two also with parameters, as in
    `abacus(field=value, ...)`, of literal values. ValueError says what's wrong with it: call it
    before any work starts."""
    name = text.strip()
    if name.startswith(f"{GYM}:"):
        return Task(name, Gym(*parse_call(name.removeprefix(f"{GYM}:"))))
    if name.partition("(")[0] == ABACUS:
        return Task(name, Abacus.of(parse_call(name)[1]))
    if name not in GRADER:
        known = ", ".join([*GRADER, ABACUS, f"{GYM}:NAME"])
        raise ValueError(f"there is no task {text!r}; known: {known}")
    return Task(name, None)


def load(task: str, source: str | None, limit: int | None, seed: int) -> list[Problem]:
    """The first `limit` problems (None: all; a generator needs a number). `seed` is a generator's
    only. ValueError: a bad task, source or limit, or a row that can't be used, with its place."""
    parsed = parse_task(task)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    if parsed.generator is not None:
        if source is not None:
            raise ValueError(f"{parsed.name} generates its problems: it takes no source")
        if limit is None:
            raise ValueError(f"{parsed.name} never ends: give a limit")
        return parsed.generator.make(parsed.name, limit, seed)
    if source is None:
        raise ValueError(f"{task} needs a source: a .jsonl file, a folder or a data set of the hub")
    problems: dict[str, Problem] = {}
    for row in islice(_rows(source), limit):
        problem = _problem(parsed.name, row)
        if problem.id in problems:
            raise ValueError(f"{row.where}: the id {problem.id!r} is there twice")
        problems[problem.id] = problem
    if not problems:
        raise ValueError(f"{source} holds no problems")
    return list(problems.values())


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME` or `NAME(field=value, ...)` with literal values."""
    wrong = f"{text!r} isn't a generator: write NAME or NAME(field=value)"
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # ValueError: a null byte
        raise ValueError(wrong) from None
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(wrong)
    params: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError(wrong)
        try:
            params[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError):
            raise ValueError(f"{text!r}: the value of {keyword.arg} must be a literal") from None
    return call.func.id, params


# -- sources ---------------------------------------------------------------------------------------


def _rows(source: str) -> Iterator[Row]:
    path = Path(source).expanduser()
    if path.is_file():
        return _lines(path)
    if path.suffix in (".jsonl", ".json"):
        raise ValueError(f"there is no file {source}")
    return _dataset(source)


def _lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in _numbered(path, file):
            where = f"{path}:{number}"
            try:
                columns = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: isn't JSON: {error}") from None
            if not isinstance(columns, dict):
                raise ValueError(f"{where}: must be a JSON object")
            yield Row(where, number, columns)


def _numbered(path: Path, file: Iterable[str]) -> Iterator[tuple[int, str]]:
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line
    except UnicodeDecodeError:
        raise ValueError(f"{path} isn't text: give the folder of a data set's files") from None


def _dataset(source: str) -> Iterator[Row]:
    """`NAME[@CONFIG][:SPLIT]`. Without a split: `test`, or the only one that there is."""
    name, config, split = source, "", ""
    if not Path(source).expanduser().is_dir():  # a folder's own name may hold the signs
        rest, _, split = source.partition(":")
        name, _, config = rest.partition("@")
    try:
        import datasets
    except ImportError:
        raise ValueError("a data set needs datasets: pip install 'taut[quality]'") from None
    path = Path(name).expanduser()
    try:
        loaded = datasets.load_dataset(str(path) if path.is_dir() else name, config or None)
    except Exception as error:
        raise ValueError(f"can't load the data set {source}: {error}") from error
    splits = list(loaded)
    chosen = split or (splits[0] if len(splits) == 1 else "test")
    if chosen not in splits:
        raise ValueError(f"{source} has no split {chosen!r}; known: {', '.join(splits)}")
    return (
        Row(f"{source}, row {number}", number, columns)
        for number, columns in enumerate(loaded[chosen], 1)
    )


def _problem(task: str, row: Row) -> Problem:
    """Columns `question` and `answer` (the final answer alone), or those of the original sets."""
    key = next((k for k in ("id", "unique_id") if row.columns.get(k) is not None), None)
    answer = _answer(task, row)
    if GRADER[task] == "number" and read_number(answer) is None:
        raise ValueError(f"{row.where}: the answer {answer!r} isn't one number")
    return Problem(
        id=f"{task}-{row.number}" if key is None else str(row.columns[key]),
        task=task,
        question=_text(row, "question", "problem"),
        answer=answer,
        grader=GRADER[task],
    )


def _answer(task: str, row: Row) -> str:
    """GSM8K's own ends in `#### 18`; MATH has it in the last box of its solution."""
    if task == "math" and row.columns.get("answer") is None:
        answer = extract_boxed(_text(row, "answer", "solution"))
        if answer is None:
            raise ValueError(f"{row.where}: its solution has no \\boxed{{}} and it has no answer")
        return answer
    answer = _text(row, "answer")
    return answer.rpartition("####")[2].strip() if task == "gsm8k" else answer


def _text(row: Row, *names: str) -> str:
    """The first of these columns that holds something."""
    for name in names:
        value = row.columns.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            text = str(value).strip()
            if text:
                return text
    raise ValueError(f"{row.where}: needs a text as {' or '.join(names)}")
