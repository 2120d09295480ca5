"""A process and all that it starts: stopped, continued, weighed and ended together.

The group belongs to our session, so that when the race itself is killed the kernel ends a stopped
group (its orphans get SIGHUP and SIGCONT) instead of leaving it stopped for ever.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from bench.common import ROOT
from bench.peers.peer import Job, PeerError, Runner

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class Group:
    """Standard error, and standard output unless `talks`, go to `log`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> None:
        self.command = list(command)
        self.log = log
        with log.open("wb") as out:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else out,
                stderr=out,
                env=None if env is None else dict(env),
                cwd=ROOT,
                process_group=0,
            )

    @property
    def stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the whole group and reaps its first process."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):  # what was buffered can't be written any more
                    pipe.close()

    def signal(self, number: signal.Signals) -> None:
        """To every member."""
        with suppress(ProcessLookupError):  # all gone
            os.killpg(self.process.pid, number)

    def members(self) -> dict[int, list[str]]:
        """Fields of /proc/PID/stat from the state on, by process id."""
        found = {}
        for folder in _PROC.iterdir():
            if folder.name.isdigit():
                fields = _stat(folder)
                if len(fields) > 2 and fields[2] == str(self.process.pid):
                    found[int(folder.name)] = fields
        return found

    def cpu_seconds(self) -> float:
        """User and system time of the living members and of children that they reaped."""
        return sum(sum(map(int, fields[11:15])) for fields in self.members().values()) / _TICKS

    def peak_bytes(self) -> int:
        """Sum of the living members' peaks: pages that two of them share count twice."""
        return sum(_peak(pid) for pid in self.members())

    def last_words(self, lines: int = 3) -> str:
        """The end of what it printed, on one line."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(said[-lines:])[-600:]


class GroupRunner(Runner):
    """A runner whose engine lives in one group for as long as it runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._group: Group | None = None

    @property
    def _running(self) -> Group:
        if self._group is None:
            raise PeerError("it isn't running")
        return self._group

    def last_words(self) -> str:
        return (self._group and self._group.last_words()) or "nothing"

    def pause(self) -> None:
        self._running.pause()

    def resume(self) -> None:
        self._running.resume()

    def cpu_seconds(self) -> float:
        return 0.0 if self._group is None else self._group.cpu_seconds()

    def peak_bytes(self) -> int:
        return self._running.peak_bytes()

    def close(self) -> None:
        if self._group is not None:
            self._group.kill()
            self._group = None


def _stat(folder: Path) -> list[str]:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # ended meanwhile
        return []


def _peak(pid: int) -> int:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def environment_for(threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a peer's process sees: so many threads, no network, none of our own settings."""
    dropped = ("OMP_", "MKL_", "KMP_", "OPENBLAS_", "GOMP_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **fixed, **(extra or {})}
