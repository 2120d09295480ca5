"""What this process may use of its machine: CPUs and memory, as affinity and cgroups leave them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """CPUs of the affinity mask, or fewer where a cgroup's quota says so; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = min(_cpu_quotas(), default=math.inf)
    return max(1, min(cpus, math.ceil(quota) if quota < math.inf else cpus))


def available_bytes() -> int:
    """Memory that may still be taken: the machine's available, or a cgroup's if that is less."""
    return max(0, min([_machine_available(), *_cgroup_left()]))


def _machine_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_folders() -> Iterator[Path]:
    """This process's cgroup (version 2) and its parents; a limit of any of them counts."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            folder = _CGROUP / line[3:].lstrip("/")
            yield from (p for p in (folder, *folder.parents) if _CGROUP in (p, *p.parents))


def _numbers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _cpu_quotas() -> Iterator[float]:
    for folder in _cgroup_folders():
        match _numbers(folder / "cpu.max"):
            case [quota, period] if quota != "max":
                yield int(quota) / int(period)
    match _numbers(_CGROUP / "cpu/cpu.cfs_quota_us"), _numbers(_CGROUP / "cpu/cpu.cfs_period_us"):
        case [[quota], [period]] if int(quota) > 0:
            yield int(quota) / int(period)


def _cgroup_left() -> Iterator[int]:
    for folder in _cgroup_folders():
        match _numbers(folder / "memory.max"), _numbers(folder / "memory.current"):
            case [[limit], [used]] if limit != "max":
                yield int(limit) - int(used)
    v1 = _CGROUP / "memory"
    match _numbers(v1 / "memory.limit_in_bytes"), _numbers(v1 / "memory.usage_in_bytes"):
        case [[limit], [used]]:
            yield int(limit) - int(used)
