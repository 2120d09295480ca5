"""What this process may use of its machine: CPUs and memory, as affinity and cgroups leave them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cpus() -> int:
    """CPUs of the affinity mask, or fewer where a cgroup's quota says so; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([cpus, *map(math.ceil, _cpu_quotas())]))


def available_bytes() -> int:
    """Memory that may still be taken: the machine's available, or a cgroup's if that is less."""
    return max(0, min([_machine_available(), *_cgroup_left()]))


def _machine_available() -> int:
    for line in _lines(_ROOT / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroups(controller: str) -> Iterator[Path]:
    """This process's cgroups (versions 1 and 2) and their parents: a limit of any of them counts.

    In a container the path may be the host's; the folders that aren't there have no limits.
    """
    mount = _ROOT / "sys/fs/cgroup"
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part and part != ".."]
        yield from (base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _numbers(path: Path) -> list[int]:
    """Of the first line; none where the file isn't there or says "max"."""
    words = " ".join(_lines(path)[:1]).split()
    return [] if "max" in words else [int(word) for word in words]


def _cpu_quotas() -> Iterator[float]:
    for folder in _cgroups("cpu"):
        match _numbers(folder / "cpu.max"):  # version 2
            case [quota, period]:
                yield quota / period
        match _numbers(folder / "cpu.cfs_quota_us"), _numbers(folder / "cpu.cfs_period_us"):
            case [quota], [period] if quota > 0:
                yield quota / period


def _cgroup_left() -> Iterator[int]:
    for folder in _cgroups("memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            match _numbers(folder / limit), _numbers(folder / used):
                case [most], [now]:
                    yield most - now + _cached(folder, cache)


def _cached(folder: Path, field: str) -> int:
    """File pages that the kernel drops when memory is wanted: a mapped model's, above all."""
    stat = dict(line.split() for line in _lines(folder / "memory.stat"))
    return int(stat.get(field, 0))
