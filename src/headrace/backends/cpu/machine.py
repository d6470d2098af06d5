"""What this machine offers the CPU backend: processor, kernel path, threads, memory.

Reads /sys, or macOS's equivalent; knows nothing of models.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

from headrace.backends.cpu import _native, processor
from headrace.backends.shared import host, macos


def describe(threads: int | None = None) -> dict[str, object]:
    count, why = choose_threads(threads)
    total, available = host.memory_bytes()
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
    """How many threads to compute with, and the reason: one per physical core that this process may
    use, and no more than its cgroup's share of processor time. If a number was asked for, that
    many, up to one per logical processor: more would only take turns on them."""
    allowed = _allowed_cpus()
    if asked is not None and asked > len(allowed):
        count = len(allowed)
        return count, f"{asked} were requested, but this process may use only {count} processors"
    if asked is not None:
        return asked, "as asked"
    if sys.platform == "darwin":
        cores, kind = macos.physical_cores()
        return (cores, f"{cores} {kind}") if cores else (os.cpu_count() or 1, "one per processor")
    cores = _physical_cores(allowed)
    count, why = cores, f"{cores} physical cores of {len(allowed)} allowed logical ones"
    quota = host.cgroup_cpus()
    if quota is not None and quota < count:
        count, why = max(1, math.floor(quota)), f"a cgroup limit of {quota:g} processors"
    return count, why


def _allowed_cpus() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def _physical_cores(cpus: list[int], sys: Path = Path("/sys/devices/system/cpu")) -> int:
    """Hyper-threads of one core share its vector units: more threads than cores only slow each
    other down."""
    cores = set()
    for cpu in cpus:
        siblings = host.read_text(sys / f"cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings or f"cpu{cpu}")
    return max(1, len(cores))
