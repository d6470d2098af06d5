"""Facts about a macOS machine from `sysctl` and `vm_stat`, in place of Linux's /proc and /sys.

Returns text and numbers; processor.py and machine.py interpret them for the kernels.
"""

from __future__ import annotations

import re
import subprocess


def sysctl(*names: str) -> dict[str, str]:
    """The values of these names, without those that this machine does not have."""
    return facts_of(_output_of("/usr/sbin/sysctl", *names))


def memory_bytes() -> tuple[int, int]:
    """Total and available memory; 0: not known."""
    total = sysctl("hw.memsize").get("hw.memsize", "")
    return int(total) if total.isdigit() else 0, available_bytes(_output_of("/usr/bin/vm_stat"))


def physical_cores() -> tuple[int, str]:
    """The number of performance cores where there are two kinds (an operation waits for its slowest
    thread), and what they are called; 0: not known."""
    fast, all_ = "hw.perflevel0.physicalcpu", "hw.physicalcpu"
    found = sysctl(fast, all_)
    if found.get(fast, "").isdigit():
        return int(found[fast]), "performance cores"
    return (int(found[all_]) if found.get(all_, "").isdigit() else 0), "physical cores"


def facts_of(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def available_bytes(vm_stat: str) -> int:
    """Free pages, and pages that the system can reclaim without writing them out."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    if page is None:
        return 0
    pages = facts_of(vm_stat)
    kinds = ("free", "inactive", "speculative", "purgeable")
    counts = (pages.get(f"Pages {kind}", "").rstrip(".") for kind in kinds)
    return int(page[1]) * sum(int(count) for count in counts if count.isdigit())


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
