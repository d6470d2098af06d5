"""How much memory and processor time the operating system allows this process.

Reads /proc and cgroup files, or macOS's equivalents; knows nothing of models and kernels.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.backends.shared import macos

_CGROUPS = Path("/sys/fs/cgroup")


def cgroup_cpus(root: Path = _CGROUPS, own: str | None = None) -> float | None:
    """The number of processors whose time the cgroup may use, or None without a limit: the lowest
    limit of this cgroup and its parents, cgroup v2 (cpu.max) or v1 (cpu.cfs_quota_us)."""
    limits: list[float] = []
    for folder, kind in _cgroup_folders("cpu", root, own):
        limits += _quota(folder, kind)
    return min(limits, default=None)


def cgroup_memory(root: Path = _CGROUPS, own: str | None = None) -> tuple[int, int] | None:
    """The lowest limit of this cgroup and its parents, and the least free memory under any of these
    limits; None without a limit. Cgroup v2 (memory.max) or v1 (memory.limit_in_bytes)."""
    found: list[tuple[int, int]] = []
    for folder, kind in _cgroup_folders("memory", root, own):
        names = ("max", "current") if kind == 2 else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (read_text(folder / f"memory.{name}") for name in names)
        if not limit.isdigit() or not used.isdigit():  # "max", or no such file
            continue
        # The file cache counts as used, but the kernel reclaims what is not in use.
        field = "inactive_file" if kind == 2 else "total_inactive_file"
        idle = re.search(rf"^{field} (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
        left = int(limit) - int(used) + (int(idle[1]) if idle else 0)
        found.append((int(limit), max(0, left)))
    if not found:
        return None
    return min(limit for limit, _ in found), min(left for _, left in found)


def _cgroup_folders(controller: str, root: Path, own: str | None) -> Iterator[tuple[Path, int]]:
    """The folders of this process's cgroup and its parents, each with its version: 2 or 1."""
    membership = read_text(Path("/proc/self/cgroup")) if own is None else own
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
        # A container may see its own cgroup at the root: walk up through folders that exist.
        for place in (folder, *folder.parents):
            yield place, kind
            if place == base:
                break


def _quota(folder: Path, kind: int) -> list[float]:
    if kind == 2:
        words = read_text(folder / "cpu.max").split()
    else:
        words = [read_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    try:
        quota, period = float(words[0]), float(words[1])
    except (IndexError, ValueError):  # "max", or no such file
        return []
    return [quota / period] if quota > 0 and period > 0 else []


def memory_bytes() -> tuple[int, int]:
    """Total and available memory, within the limits of the cgroup; 0: not known."""
    if sys.platform == "darwin":
        return macos.memory_bytes()
    facts: dict[str, int] = {}
    for line in read_text(Path("/proc/meminfo")).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            facts[name] = int(words[0]) * 1024
    total, available = facts.get("MemTotal", 0), facts.get("MemAvailable", 0)
    limits = cgroup_memory()
    if limits is None or not total:
        return total, available
    return min(total, limits[0]), min(available, limits[1])


def free_bytes(share: int | None = None) -> int:
    """Available memory, and no more than this engine's share of it; 0: not known."""
    _, available = memory_bytes()
    return min(available, share) if share and available else available


def read_text(path: Path) -> str:
    """The file's text, stripped; empty where it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
