"""A run's record while it goes on: a line a sample, so that an interrupted run can resume.

The record of `RUN.json` is `RUN.json.partial`. It goes when the run is complete and written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.evaluation.records import Sample, Usage
from bench.evaluation.records_json import (
    sample_from_json,
    sample_to_json,
    usage_from_json,
    usage_to_json,
)


class Store:
    """Samples that are done and what they took, on disk as they come.

    ValueError: the record there is of a run with other settings, or is no record.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self.samples: list[Sample] = []
        self.usages: list[tuple[str, Usage]] = []  # (task, what was taken since the one before)
        self.resumed = 0  # how many samples were there already
        self._target = target
        self._path = target.with_name(target.name + ".partial")
        self.settings = json.loads(json.dumps(settings))
        if not target.parent.is_dir():
            raise ValueError(f"--json {target}: there is no folder {target.parent}")
        if self._path.exists():
            self._read()
        self._file = self._path.open("a", encoding="utf-8")
        if not self._path.stat().st_size:
            self._write({"settings": self.settings})

    def _read(self) -> None:
        raw = self._path.read_bytes()
        complete = raw[: raw.rfind(b"\n") + 1]  # a line that was cut short is done again
        os.truncate(self._path, len(complete))
        head, *lines = complete.decode().splitlines() or ["{}"]
        if lines or complete:
            self._check(json.loads(head).get("settings"))
        for line in map(json.loads, lines):
            self.samples.append(sample_from_json(line["sample"]))
            self.usages.append((line["sample"]["task"], usage_from_json(line["usage"])))
        self.resumed = len(self.samples)

    def _check(self, theirs: Mapping[str, Any] | None) -> None:
        if theirs is None:
            raise ValueError(f"{self._path} is no record of a run; move it away")
        names = sorted({*theirs, *self.settings})
        other = [name for name in names if theirs.get(name) != self.settings.get(name)]
        if other:
            pairs = ", ".join(
                f"{name} {theirs.get(name)!r} there, {self.settings.get(name)!r} now"
                for name in other
            )
            raise ValueError(
                f"{self._path} is of an interrupted run with other settings ({pairs}): finish it "
                "with those, remove it, or give another --json"
            )

    def add(self, sample: Sample, usage: Usage) -> None:
        """`usage` is what the run took since the sample before."""
        self.samples.append(sample)
        self.usages.append((sample.task, usage))
        self._write({"sample": sample_to_json(sample), "usage": usage_to_json(usage)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def finish(self, run: Mapping[str, Any]) -> None:
        """Write the run as one line to its file, and drop the record."""
        new = self._target.with_name(self._target.name + ".new")
        new.write_text(json.dumps(run, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(new, self._target)
        self.close()
        self._path.unlink()

    def close(self) -> None:
        self._file.close()
