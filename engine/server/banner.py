"""What a starting server tells its terminal: the wait, what was chosen and why, the address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from engine.choices import backend_rows
from engine.request import MAIN
from engine.server.settings import Settings
from engine.service import AsyncEngine


class Banner:
    """Writes to a terminal or a log."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def _line(self, text: str) -> None:
        self._file.write(f"{text}\n")
        self._file.flush()

    @contextmanager
    def loading(self, model: str) -> Iterator[None]:
        """A clock on a terminal, one line elsewhere."""
        if not self._file.isatty():
            self._line(f"loading {model}")
            yield
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=self._file), transient=True) as bar:
            bar.add_task(f"loading {model}", total=None)
            yield

    def ready(self, settings: Settings, engine: AsyncEngine, seconds: float, url: str) -> None:
        for name, value in _rows(settings, engine):
            self._line(f"{name:<11}{value}")
        self._line(f"ready in {seconds:.1f} s: {url}/v1")


def _rows(settings: Settings, engine: AsyncEngine) -> Iterator[tuple[str, str]]:
    loaded = engine.engine.models[MAIN]
    config = loaded.checkpoint.config
    yield (
        "model",
        f"{loaded.checkpoint.source}: {config.family}, {config.layers} layers, "
        f"{loaded.decoder.nbytes / 2**20:.0f} MiB of weights ({settings.weights}), "
        f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}",
    )
    yield from backend_rows(loaded.spec, loaded.checkpoint)
    own = "the model's own" if settings.max_model_len is None else "--max-model-len"
    yield "context", f"{engine.engine.max_model_len} tokens ({own})"
    kv = engine.stats().kv[MAIN]
    per_token = config.layers * config.kv_heads * kv.page_bytes / 16
    policy = f"{loaded.spec.kv.policy}, budget {settings.kv_budget}"
    yield (
        "KV cache",
        f"{kv.pages * kv.page_bytes / 2**20:.0f} MiB, {kv.pages * kv.page_bytes / per_token:.0f} "
        f"tokens uncompressed; {'full cache' if loaded.spec.kv.policy is None else policy}",
    )
    markers = "thinking markers" if engine.engine.markers.end else "no thinking markers"
    yield "reasoning", f"{markers}, loop guard {'on' if settings.loop_guard else 'off'}"
    yield (
        "load",
        f"{settings.max_num_seqs} sequences at once, {settings.max_queued} may wait, "
        f"{engine.engine.config.threads or 'all'} threads",
    )
    keys = len(settings.api_key)
    yield (
        "keys",
        f"{keys} key{'s' * (keys != 1)}" if keys else "none: anyone who connects is served",
    )
