"""This machine's GPUs while the endpoint works: memory, use and links, as nvidia-smi tells them.

Only asked where the endpoint is on this machine. No GPU, no nvidia-smi: nothing is known, and that
is what comes back.
"""

from __future__ import annotations

import shutil
import subprocess

from headrace.doctor.observation import GpuNow

_LIMIT_S = 10
_QUERY = "name,memory.used,memory.total,utilization.gpu"
_MIB = 1 << 20


def gpus_now() -> tuple[GpuNow, ...]:
    text = _ask(f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits")
    return read_gpus(text) if text is not None else ()


def links_here() -> str | None:
    """How this machine's GPUs are joined: nvlink, pcie, or None where there is one or none."""
    text = _ask("topo", "-m")
    return read_links(text) if text is not None else None


def read_gpus(text: str) -> tuple[GpuNow, ...]:
    found = []
    for line in text.strip().splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 4:
            continue
        used, memory, busy = (_number(part) for part in parts[1:])
        found.append(
            GpuNow(
                name=parts[0],
                used_bytes=None if used is None else used * _MIB,
                memory_bytes=None if memory is None else memory * _MIB,
                busy_share=None if busy is None else busy / 100,
            )
        )
    return tuple(found)


def read_links(text: str) -> str | None:
    """NV# between two GPUs is NVLink; PIX, PXB, PHB, NODE and SYS are ways over PCIe."""
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU")]
    count = len(rows)
    between = {
        cell
        for at, row in enumerate(rows)
        for other, cell in enumerate(row[1 : count + 1])
        if other != at
    }
    if not between:
        return None
    return "nvlink" if all(cell.startswith("NV") for cell in between) else "pcie"


def _ask(*arguments: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]"
