"""What stderr shows while a run goes; stdout is left to the final table.

A terminal gets two lines for each task, redrawn four times a second so that the clock moves while
no sample ends. Anything else gets a plain line for about every tenth of a task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from rich import live, progress_bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.evaluation import units
from bench.evaluation.records import Interval, Sample


@dataclass(slots=True, kw_only=True)
class _Task:
    """Running figures of one task, over the samples that `show` brought."""

    name: str
    total: int
    earlier: int  # samples that a resumed run already had: counted, in no figure
    interval: Callable[[int, int], Interval]
    start: float = field(default_factory=perf_counter)
    end: float | None = None
    shown: int = 0
    right: int = 0
    graded: int = 0
    crashed: int = 0
    errors: int = 0
    at_limit: int = 0
    loops: int = 0
    thinking_tokens: int = 0
    output_tokens: int = 0

    @property
    def done(self) -> int:
        return self.earlier + self.shown

    @property
    def tenths(self) -> int:
        return 10 * self.done // max(self.total, 1)

    @property
    def elapsed(self) -> float:
        return (perf_counter() if self.end is None else self.end) - self.start

    def add(self, sample: Sample) -> None:
        self.shown += 1
        self.right += sample.right
        self.graded += sample.graded
        self.errors += not sample.graded
        self.at_limit += sample.at_limit
        self.loops += sample.loop is not None
        if sample.verdict == "error":
            self.crashed += 1
        else:
            self.thinking_tokens += sample.thinking_tokens
        self.output_tokens += sample.output_tokens
        if self.done >= self.total:
            self.end = perf_counter()

    def figures(self) -> str:
        accuracy = "accuracy n/a"
        if self.graded:
            share = units.percent_range(
                self.right / self.graded, self.interval(self.right, self.graded)
            )
            accuracy = f"accuracy {share}"
        finished = self.shown - self.crashed
        chain = self.thinking_tokens / finished if finished else None
        rate = self.output_tokens / self.elapsed if self.shown and self.elapsed else None
        return (
            f"{accuracy}, chain {units.count(chain, 'tokens')}, {units.count(rate, 'tokens/s')}, "
            f"{self.at_limit} at limit, {self.loops} looped, {self.errors} errors"
        )

    def clocks(self) -> str:
        elapsed = f"{units.clock(self.elapsed)} elapsed"
        if self.done >= self.total or not self.shown:
            return elapsed
        left = self.elapsed / self.shown * (self.total - self.done)
        return f"{elapsed}, {units.clock(left)} left"

    def line(self) -> str:
        return f"{self.name}: {self.done}/{self.total}, {self.figures()}, {self.clocks()}"


class Live:
    """The view of one run: `with Live(wilson) as view: view.begin(...); view.show(sample)`.

    `interval(right, graded)` is the 95 % range of the running accuracy. One thread calls.
    """

    def __init__(self, interval: Callable[[int, int], Interval]) -> None:
        self._interval = interval
        self._tasks: dict[str, _Task] = {}
        self._screen: live.Live | None = None
        if sys.stderr.isatty():
            # stdout may be piped away while stderr is a terminal: it isn't redirected here
            self._screen = live.Live(
                console=Console(stderr=True), get_renderable=self._render, redirect_stdout=False
            )

    def __enter__(self) -> Live:
        if self._screen is not None:
            self._screen.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._screen is not None:
            self._screen.stop()

    def begin(self, task: str, total: int, done: int) -> None:
        """A task starts; `done` of its `total` samples are from earlier and won't be shown."""
        self._tasks[task] = _Task(name=task, total=total, earlier=done, interval=self._interval)
        earlier = f", {done} done earlier" if done else ""
        self._write(f"{task}: {total} samples{earlier}")

    def show(self, sample: Sample) -> None:
        """A sample of a task that has begun is graded."""
        task = self._tasks[sample.task]
        before = task.tenths
        task.add(sample)
        if task.tenths > before:
            self._write(task.line())

    def _write(self, line: str) -> None:
        if self._screen is None:
            print(line, file=sys.stderr, flush=True)

    def _render(self) -> Group:
        return Group(*(part for task in list(self._tasks.values()) for part in _rows(task)))


def _rows(task: _Task) -> tuple[Table, Text]:
    bar = progress_bar.ProgressBar(total=max(task.total, 1), completed=task.done)
    head = Table.grid(padding=(0, 1), expand=True)
    head.add_column()
    head.add_column(ratio=1)
    head.add_column(no_wrap=True)
    head.add_row(Text(task.name), bar, Text(f"{task.done}/{task.total}, {task.clocks()}"))
    return head, Text(f"  {task.figures()}", style="dim")
