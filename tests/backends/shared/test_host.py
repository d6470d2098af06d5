"""Limits of cgroups, version 2 and 1, from folders that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.backends.shared import host
from headrace.backends.shared.host import cgroup_cpus, cgroup_memory

GIB = 1 << 30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        prefix, _, rest = name.partition("_")
        (folder / f"{prefix}.{rest}").write_text(f"{content}\n")


def test_memory_of_version_2_is_the_tightest_of_the_parents(tmp_path: Path) -> None:
    write(tmp_path / "a", memory_max=8 * GIB, memory_current=7 * GIB)
    write(
        tmp_path / "a/b",
        memory_max=4 * GIB,
        memory_current=3 * GIB,
        memory_stat=f"anon 5\ninactive_file {GIB // 2}\nactive_file 9",
    )
    # 1 GiB and the file cache are left below the inner limit, 1 GiB below the outer one.
    assert cgroup_memory(tmp_path, "0::/a/b") == (4 * GIB, GIB)
    write(tmp_path / "a", memory_max="max")
    assert cgroup_memory(tmp_path, "0::/a/b") == (4 * GIB, GIB + GIB // 2)


def test_memory_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path / "a", memory_max="max", memory_current=5)
    assert cgroup_memory(tmp_path, "0::/a") is None
    assert cgroup_memory(tmp_path, "0::/elsewhere") is None
    assert cgroup_memory(tmp_path, "") is None


def test_memory_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path / "memory/box",
        memory_limit_in_bytes=2 * GIB,
        memory_usage_in_bytes=GIB,
        memory_stat="inactive_file 1\ntotal_inactive_file 7",
    )
    own = "5:cpu,cpuacct:/box\n4:memory:/box\n0::/"
    assert cgroup_memory(tmp_path, own) == (2 * GIB, GIB + 7)


def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path) -> None:
    write(tmp_path, memory_max=GIB, memory_current=2 * GIB)
    assert cgroup_memory(tmp_path, "0::/not/visible/here") == (GIB, 0)


def test_processors_of_both_versions(tmp_path: Path) -> None:
    write(tmp_path / "a", cpu_max="150000 100000")
    write(tmp_path / "a/b", cpu_max="max 100000")
    assert cgroup_cpus(tmp_path, "0::/a/b") == 1.5
    write(tmp_path / "cpu/c", cpu_cfs_quota_us=50000, cpu_cfs_period_us=100000)
    assert cgroup_cpus(tmp_path, "3:cpu:/c") == 0.5


def test_memory_is_what_machine_and_cgroup_both_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cgroup_memory", lambda: None)
    total, available = host.memory_bytes()
    assert 0 < available <= total
    monkeypatch.setattr(host, "cgroup_memory", lambda: (GIB, 5))
    assert host.memory_bytes() == (min(total, GIB), 5)
    monkeypatch.setattr(host, "cgroup_memory", lambda: (1 << 62, 1 << 62))
    assert host.memory_bytes()[0] == total
