"""A run's record while it goes on: a line a sample, so that an interrupted run can resume.

The record of `RUN.json` is `RUN.json.partial`. It goes when the run is complete and written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from bench.evaluation.records import Sample, Usage
from bench.evaluation.records_json import line_from_json, line_to_json


class InUse(ValueError):
    """Another run is at work on this record, or has just finished it."""


class Store:
    """Samples that are done and what they took, on disk as they come; a context manager.

    ValueError: the record there is of a run with other settings, is another run's that is at work
    (InUse), or is no record.
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
        self._file = self._path.open("ab")
        try:
            self._lock()
        except BaseException:
            self._file.close()  # and leave it, empty as it may be: it's another's
            raise
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.fstat(self._file.fileno()).st_nlink > 0  # it wasn't finished meanwhile
        except BlockingIOError:
            ours = False
        if not ours:
            raise InUse(f"{self._path} is being written by another run: give another --json")

    def _read(self) -> None:
        """Samples that crashed are made again; what they took stays."""
        raw = self._path.read_bytes()
        complete = raw[: raw.rfind(b"\n") + 1]  # a line that was cut short is done again
        head, *lines = complete.decode().split("\n")[:-1] or [""]
        if head:
            self._check(_settings(head))
        done: dict[tuple[str, str, int], Sample] = {}
        for number, line in enumerate(lines, 2):
            sample, usage = line_from_json(line, f"{self._path}:{number}")
            if sample.key in done:
                raise ValueError(f"{self._path}:{number} is there twice: {sample.key}")
            if sample.verdict != "error":
                done[sample.key] = sample
            self.usages.append((sample.task, usage))
        self.samples = list(done.values())
        self.resumed = len(self.samples)
        os.truncate(self._path, len(complete))

    def _check(self, theirs: Mapping[str, Any] | None) -> None:
        if theirs is None:
            raise ValueError(f"{self._path} is no record of a run; move it away")
        if other := differences(theirs, self.settings):
            raise ValueError(
                f"{self._path} is of an interrupted run with other settings ({other}): finish it "
                "with those, remove it, or give another --json"
            )

    def add(self, sample: Sample, usage: Usage) -> None:
        """`usage` is what the run took since the sample before."""
        self.samples.append(sample)
        self.usages.append((sample.task, usage))
        self._write(line_to_json(sample, usage))

    def _write(self, line: dict[str, Any]) -> None:
        if not self._path.stat().st_size:
            self._file.write(_encoded({"settings": self.settings}))
            self._file.flush()
        self._file.write(_encoded(line))
        self._file.flush()

    def finish(self, run: Mapping[str, Any]) -> None:
        """Write the run as one line to its file, and drop the record."""
        new = self._target.with_name(self._target.name + ".new")
        new.write_bytes(_encoded(run))
        os.replace(new, self._target)
        self._path.unlink()
        self.close()

    def close(self) -> None:
        """A record of nothing doesn't stay."""
        if self._path.exists() and not self._path.stat().st_size:
            self._path.unlink()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Settings that differ, in words; empty if none does."""
    names = sorted({*theirs, *ours})
    return ", ".join(
        f"{name} {theirs.get(name)!r} there, {ours.get(name)!r} now"
        for name in names
        if theirs.get(name) != ours.get(name)
    )


def _encoded(line: Mapping[str, Any]) -> bytes:
    """A model may leave half a surrogate pair, which has no UTF-8. ValueError: NaN or infinity."""
    text = json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "replace")


def _settings(line: str) -> Mapping[str, Any] | None:
    """Of a record's first line; None if it is none."""
    try:
        held = json.loads(line)
    except json.JSONDecodeError:
        return None
    settings = held.get("settings") if isinstance(held, dict) else None
    return settings if isinstance(settings, dict) else None
