"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from engine.output import Output


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[Output], None]]:
    """Call what it yields with each finished Output; shows requests done and output tokens/s."""
    show = sys.stderr.isatty() and total > 1 if wanted is None else wanted
    if not show:
        yield lambda output: None
        return
    # a start-up without a bar doesn't pay for importing this
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    tokens = 0
    start = perf_counter()
    with Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("", total=total, rate=0.0)

        def advance(output: Output) -> None:
            nonlocal tokens
            tokens += sum(len(choice.token_ids) for choice in output.choices)
            bar.update(task, advance=1, rate=tokens / (perf_counter() - start))

        yield advance
