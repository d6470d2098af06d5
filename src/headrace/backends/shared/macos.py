"""What macOS says of its machine, where Linux has /proc and /sys: `sysctl` and `vm_stat`.

Gives text and numbers; what they mean for the kernels is processor.py's and machine.py's.
"""

from __future__ import annotations

import re
import subprocess


def sysctl(*names: str) -> dict[str, str]:
    """What is known of these names: those that this machine does not have are left out."""
    return facts_of(_output_of("/usr/sbin/sysctl", *names))


def memory_bytes() -> tuple[int, int]:
    """Total and available memory; 0: not known."""
    total = sysctl("hw.memsize").get("hw.memsize", "")
    return int(total) if total.isdigit() else 0, available_bytes(_output_of("/usr/bin/vm_stat"))


def physical_cores() -> tuple[int, str]:
    """Cores of the fast kind, where there are two: an operation waits for its slowest thread. And
    what they are called; 0: not known."""
    fast, all_ = "hw.perflevel0.physicalcpu", "hw.physicalcpu"
    found = sysctl(fast, all_)
    if found.get(fast, "").isdigit():
        return int(found[fast]), "performance cores"
    return (int(found[all_]) if found.get(all_, "").isdigit() else 0), "physical cores"


def facts_of(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def available_bytes(vm_stat: str) -> int:
    """Pages that nobody uses and those that the system takes back without writing them out."""
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
