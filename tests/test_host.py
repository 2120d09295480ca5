"""Limits of CPUs and memory, on made-up trees of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import host

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 CPUs and 16 GiB, without cgroups."""
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def cgroup(root: Path, folder: str, **files: object) -> None:
    for name, text in files.items():
        write(root, f"sys/fs/cgroup/{folder}/{name.replace('__', '.')}", text)


def test_no_cgroups(root: Path) -> None:
    assert (host.usable_cpus(), host.available_bytes()) == (8, 16 * GIB)


def test_this_machine() -> None:
    assert 1 <= host.usable_cpus() <= (os.cpu_count() or 1)
    assert host.available_bytes() > 0


def test_affinity(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert host.usable_cpus() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # not Linux
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert host.usable_cpus() == 1


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("max 100000", 8), ("300000 100000", 3), ("250000 100000", 3), ("1000 100000", 1)],
)
def test_cpus_of_version_2(root: Path, quota: str, cpus: int) -> None:
    write(root, "proc/self/cgroup", "0::/user/job")
    cgroup(root, "user/job", cpu__max=quota)
    assert host.usable_cpus() == cpus


def test_a_parent_s_limits_count(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/user/job")
    cgroup(root, "user/job", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    cgroup(root, "user", cpu__max="200000 100000", memory__max=4 * GIB, memory__current=GIB)
    assert (host.usable_cpus(), host.available_bytes()) == (2, 3 * GIB)


def test_memory_of_version_2(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    cgroup(root, "", memory__max=6 * GIB, memory__current=2 * GIB)
    assert host.available_bytes() == 4 * GIB
    # a mapped model's pages can be dropped
    cgroup(root, "", memory__stat=f"anon 5\ninactive_file {GIB}\nactive_file 7")
    assert host.available_bytes() == 5 * GIB
    cgroup(root, "", memory__current=8 * GIB)
    assert host.available_bytes() == 0
    cgroup(root, "", memory__max=64 * GIB)
    assert host.available_bytes() == 16 * GIB  # the machine's


V1 = "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a"


@pytest.mark.parametrize("inside", [True, False])
def test_version_1(root: Path, inside: bool) -> None:
    """In a container the host's path isn't there: its own cgroup is the mount's root."""
    write(root, "proc/self/cgroup", V1)
    at = "" if inside else "/docker/a"
    cgroup(root, f"cpu{at}", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    files = {"memory__limit_in_bytes": 3 * GIB, "memory__usage_in_bytes": 2 * GIB}
    cgroup(root, f"memory{at}", **files)
    assert (host.usable_cpus(), host.available_bytes()) == (2, GIB)
    cgroup(root, f"memory{at}", memory__stat=f"cache 9\ntotal_inactive_file {GIB}")
    assert host.available_bytes() == 2 * GIB


def test_version_1_without_limits(root: Path) -> None:
    write(root, "proc/self/cgroup", V1)
    cgroup(root, "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    files = {"memory__limit_in_bytes": 2**63 - 4096, "memory__usage_in_bytes": GIB}
    cgroup(root, "memory", **files)
    assert (host.usable_cpus(), host.available_bytes()) == (8, 16 * GIB)


def test_a_namespace_s_path_never_leaves_the_mount(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/../../job")
    cgroup(root, "", cpu__max="100000 100000")
    assert host.usable_cpus() == 1
