"""What stderr shows while a run goes; stdout is left to the final table.

A terminal gets two lines for each task, redrawn four times a second so that the clock moves while
no sample ends. Anything else gets a plain line for about every tenth of a task.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from rich import live, progress_bar
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.evaluation import units
from bench.evaluation.records import Sample
from bench.evaluation.summary import graded_accuracy


@dataclass(slots=True, kw_only=True)
class _Task:
    """Running figures of one task, over the samples that `show` brought."""

    name: str
    total: int
    earlier: int  # samples that a resumed run already had: counted, in no figure
    start: float = field(default_factory=perf_counter)
    end: float | None = None
    samples: list[Sample] = field(default_factory=list)
    figures: str = "accuracy n/a"

    @property
    def done(self) -> int:
        return self.earlier + len(self.samples)

    @property
    def tenths(self) -> int:
        return 10 * self.done // max(self.total, 1)

    @property
    def elapsed(self) -> float:
        return (perf_counter() if self.end is None else self.end) - self.start

    def add(self, sample: Sample) -> None:
        self.samples.append(sample)
        if self.done >= self.total:
            self.end = perf_counter()
        self.figures = self._figures()

    def _figures(self) -> str:
        samples = self.samples
        finished = [sample for sample in samples if sample.verdict != "error"]
        share = units.NONE
        if any(sample.graded for sample in samples):
            share = units.percent_range(*graded_accuracy(samples))
        chain = sum(s.thinking_tokens for s in finished) / len(finished) if finished else None
        rate = sum(s.output_tokens for s in samples) / self.elapsed if self.elapsed else None
        counts = {
            "at limit": sum(sample.at_limit for sample in samples),
            "looped": sum(sample.loop is not None for sample in samples),
            "crashed": len(samples) - len(finished),
            "grader failed": sum(sample.verdict == "grader_error" for sample in samples),
        }
        return ", ".join(
            (
                f"accuracy {share}",
                f"chain {units.count(chain, 'tokens')}",
                units.count(rate, "tokens/s"),
                *(f"{count} {name}" for name, count in counts.items()),
            )
        )

    def clocks(self) -> str:
        elapsed = f"{units.clock(self.elapsed)} elapsed"
        if self.done >= self.total or not self.samples:
            return elapsed
        left = self.elapsed / len(self.samples) * (self.total - self.done)
        return f"{elapsed}, {units.clock(left)} left"

    def line(self) -> str:
        return f"{self.name}: {self.done}/{self.total}, {self.figures}, {self.clocks()}"


class Live:
    """The view of one run: `with Live() as view: view.begin(...); view.show(sample)`. One thread
    calls."""

    def __init__(self) -> None:
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
        self._tasks[task] = _Task(name=task, total=total, earlier=done)
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
    return head, Text(f"  {task.figures}", style="dim")
