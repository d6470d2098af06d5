"""What this machine has for the CPU backend: processor, kernel path, threads, memory.

Reads /proc, /sys and cgroup files, and on macOS what stands in for them; knows nothing of models.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.backends.cpu import _native, macos, processor

_CGROUPS = Path("/sys/fs/cgroup")


def describe(threads: int | None = None) -> dict[str, object]:
    count, why = choose_threads(threads)
    total, available = memory_bytes()
    name, features = processor.describe()
    return {
        "cpu": name,
        "features": features,
        "path": _native.paths()[0],
        "threads": count,
        "threads_why": why,
        "memory_total_bytes": total,
        "memory_available_bytes": available,
    }


def choose_threads(asked: int | None = None) -> tuple[int, str]:
    """How many threads to compute with, and the reason: one a physical core this process may use,
    no more than its cgroup's share of processor time. Those that were asked for, up to one a
    logical processor: more would only take turns on them."""
    allowed = _allowed_cpus()
    if asked is not None and asked > len(allowed):
        count = len(allowed)
        return count, f"{asked} asked for, and this process may use {count} processors"
    if asked is not None:
        return asked, "as asked"
    if sys.platform == "darwin":
        cores, kind = macos.physical_cores()
        return (cores, f"{cores} {kind}") if cores else (os.cpu_count() or 1, "one a processor")
    cores = _physical_cores(allowed)
    count, why = cores, f"{cores} physical cores of {len(allowed)} allowed logical ones"
    quota = cgroup_cpus()
    if quota is not None and quota < count:
        count, why = max(1, math.floor(quota)), f"a cgroup limit of {quota:g} processors"
    return count, why


def _allowed_cpus() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def _physical_cores(cpus: list[int], sys: Path = Path("/sys/devices/system/cpu")) -> int:
    """Hyper-threads of one core share its vector units: more threads than cores only get in each
    other's way."""
    cores = set()
    for cpu in cpus:
        siblings = _read(sys / f"cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return max(1, len(cores))


def cgroup_cpus(root: Path = _CGROUPS, own: str | None = None) -> float | None:
    """Processors' worth of time the cgroup may use, or None without a limit: the tightest of this
    cgroup and its parents, cgroup v2 (cpu.max) or v1 (cpu.cfs_quota_us)."""
    limits: list[float] = []
    for folder, kind in _cgroup_folders("cpu", root, own):
        limits += _quota(folder, kind)
    return min(limits, default=None)


def cgroup_memory(root: Path = _CGROUPS, own: str | None = None) -> tuple[int, int] | None:
    """The tightest limit of this cgroup and its parents, and the least that is left below any;
    None without a limit. Cgroup v2 (memory.max) or v1 (memory.limit_in_bytes)."""
    found: list[tuple[int, int]] = []
    for folder, kind in _cgroup_folders("memory", root, own):
        names = ("max", "current") if kind == 2 else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_read(folder / f"memory.{name}") for name in names)
        if not limit.isdigit() or not used.isdigit():  # "max", or no such file
            continue
        # Files that were read and are not in use count as used; the kernel takes them back.
        field = "inactive_file" if kind == 2 else "total_inactive_file"
        idle = re.search(rf"^{field} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        left = int(limit) - int(used) + (int(idle[1]) if idle else 0)
        found.append((int(limit), max(0, left)))
    if not found:
        return None
    return min(limit for limit, _ in found), min(left for _, left in found)


def _cgroup_folders(controller: str, root: Path, own: str | None) -> Iterator[tuple[Path, int]]:
    """The folders of this process's cgroup and its parents, each with its version: 2 or 1."""
    membership = _read(Path("/proc/self/cgroup")) if own is None else own
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            base, kind = root, 2
        elif controller in controllers.split(","):
            base, kind = root / controllers, 1
            if not base.is_dir():
                base = root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        # A container may see its own cgroup at the root: walk up through what exists.
        for place in (folder, *folder.parents):
            yield place, kind
            if place == base:
                break


def _quota(folder: Path, kind: int) -> list[float]:
    if kind == 2:
        words = _read(folder / "cpu.max").split()
    else:
        words = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = float(words[0]), float(words[1])
    except (IndexError, ValueError):  # "max", or no such file
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def memory_bytes() -> tuple[int, int]:
    """Total and available memory, as the kernel sees it and the cgroup allows; 0: not known."""
    if sys.platform == "darwin":
        return macos.memory_bytes()
    facts: dict[str, int] = {}
    for line in _read(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * 1024
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limits = cgroup_memory()
    if limits is None or not total:
        return total, available
    return min(total, limits[0]), min(available, limits[1])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
