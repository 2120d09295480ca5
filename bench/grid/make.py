"""A grid's runs, one after the other, as `bench.quality` makes each. Here is what needs torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from bench import quality
from bench.abacus.problems import tokens_of
from bench.abacus.task import Abacus
from bench.common import options_from
from bench.evaluation import prompts, units
from bench.evaluation.grading import Grading
from bench.evaluation.problems import parse_task
from bench.evaluation.records import Problem, Run, Sample
from bench.evaluation.store import InUse, Store
from bench.grid.folder import PROFILE, is_done
from bench.grid.points import Point
from engine.build import load_tokenizer, shape_of
from engine.cache.allocations.reasonalloc import read_wave
from engine.calibrate.kv_wave import COVERAGE, measure, read_prompts, write_wave
from engine.config import ModelSpec
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.prompt import Chat

SOLVED = 500
"""Problems whose median length shares are taken of, whatever is asked: of seed 0."""
WAVE_SEED = -1


class Silent:
    """A view that shows nothing of a run: the grid tells when it is done."""

    def begin(self, task: str, total: int, done: int) -> None: ...
    def show(self, sample: Sample) -> None: ...


def typical_length(task: str) -> int | None:
    """Median tokens of question and solution, without the template and re-checks; None: the task
    has no solutions."""
    generator = parse_task(task).generator
    if not isinstance(generator, Abacus):
        return None
    solved = generator.solved(SOLVED, seed=0)
    return round(median(tokens_of(each.question) + tokens_of(each.chain) for each in solved))


def cell_bytes(checkpoint: Checkpoint) -> int:
    """Keys, values and position of one bf16 cell in every head of every layer."""
    shape = shape_of(checkpoint.config)
    return shape.layers * shape.kv_heads * (2 * shape.head_dim * 2 + 4)


def ensure_profile(folder: Path, model: str, task: str) -> tuple[float, ...]:
    """The layers' demands, measured once a folder: for the abacus on problems of its own."""
    file = folder / PROFILE
    if not file.is_file():
        checkpoint, generator = open_checkpoint(model), parse_task(task).generator
        texts = read_prompts(None)
        if isinstance(generator, Abacus):
            texts = abacus_texts(checkpoint, generator, len(texts))
        demand = measure(ModelSpec(model), texts)
        new = file.with_name(f"{PROFILE}.{os.getpid()}")
        write_wave(new, checkpoint.source, COVERAGE, len(texts), demand)
        os.replace(new, file)
    return read_wave(file)


def abacus_texts(checkpoint: Checkpoint, task: Abacus, count: int) -> list[str]:
    """Solved problems as the model writes them, of a seed that no grid has."""
    tokenizer = load_tokenizer(checkpoint)
    texts = []
    for each in task.solved(count, WAVE_SEED):
        asked = Chat(messages=prompts.messages(each.question, instruction="")).render(tokenizer)
        texts.append(f"{asked}<think>\n{each.chain}\n</think>\n\n{each.answer}")
    return texts


class Maker:
    """Makes points into a folder; `base` are bench.quality's options of all of them."""

    def __init__(self, folder: Path, base: Sequence[str], digest: str) -> None:
        self._folder = folder
        self._base = base
        self._identity = {"model_digest": digest}
        self._tasks: dict[str, list[Problem]] = {}

    def prepare(self, points: Sequence[Point]) -> list[Point]:
        """Those that aren't done. ValueError: one can't be made, or is there made otherwise; all
        are looked at before any is made."""
        waiting = []
        for point in points:
            args = self._args(point)
            quality.check(args)
            self._tasks = self._tasks or quality.load_tasks(args)
            try:
                options_from(args).kv()
            except ValueError as error:
                raise ValueError(f"{point.name}: {error}") from None
            if not is_done(self._path(point), self._settings(point, args)):
                waiting.append(point)
        return waiting

    def make(self, point: Point, grading: Grading) -> Run | None:
        """None: another process is at work on it, or has just done it."""
        args, path = self._args(point), self._path(point)
        settings = self._settings(point, args)
        try:
            store = Store(path, settings)
        except InUse:
            return None
        with store, ExitStack() as stack:
            if is_done(path, settings):
                return None
            backend = quality.backend_of(args)
            stack.callback(backend.close)
            return quality.finish(args, self._tasks, store, backend, grading, Silent())

    def _path(self, point: Point) -> Path:
        return self._folder / point.file

    def _args(self, point: Point) -> argparse.Namespace:
        named = ["--json", str(self._path(point)), "--name", point.name]
        return quality.arguments([*self._base, *named, *point.flags])

    def _settings(self, point: Point, args: argparse.Namespace) -> dict[str, Any]:
        settings = quality.settings_of(args, self._tasks) | self._identity
        if PROFILE in (args.kv_allocation or ""):
            settings["kv_wave"] = list(ensure_profile(self._folder, args.model, args.task[0]))
        del settings["threads"]  # decides neither answers nor bytes
        # as JSON has it
        return dict(json.loads(json.dumps(settings | {"grid": point.told()})))


def told(run: Run) -> str:
    """A finished run in a line."""
    s = run.summary
    return (
        f"{run.name}: {units.percent_range(s.accuracy, s.accuracy_ci)} right,"
        f" {s.thinking_tokens_mean:.0f} tokens of chain, {units.percent(s.looped_share)} looped,"
        f" {s.wall_seconds:.0f} s ({s.cpu_seconds or 0:.0f} s CPU)"
    )
