"""This host as a row like those of the tables: what the system says about its CPU, memory and GPUs.

Reads /proc and asks nvidia-smi where there is one; measures nothing, so bandwidth and rates are
None for the CPU: `headrace calibrate` measures them. A system that does not tell leaves None.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from types import MappingProxyType

from headrace.core.errors import ConfigError
from headrace.core.sizes import KIB, MIB
from headrace.hardware.gpus import Gpu, Source, find_gpu
from headrace.hardware.profile import Profile

NAME = "this-machine"
_SMI_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A GPU that the driver lists: its name, its memory, and the row that it is, if any is."""

    driver_name: str
    memory_bytes: int
    gpu: Gpu | None


def this_machine(proc: Path = Path("/proc")) -> Gpu:
    """This host's CPU and memory."""
    memory_bytes = memory_bytes_of(proc)
    where = Source(title=f"{proc}/meminfo on this machine", date=date.today().isoformat())
    return Gpu(
        name=NAME,
        label=f"{cpu_name_of(proc) or platform.machine()}, {os.cpu_count() or 1} threads",
        vendor="",
        kind="cpu",
        family=NAME,
        aliases=("here",),
        memory_bytes=memory_bytes,
        nominal_bytes=None,
        bandwidth_bytes_s=None,
        flops=MappingProxyType({}),
        sms=None,
        capability=None,
        link_bytes_s=None,
        pcie_bytes_s=None,
        prices=(),
        sources=MappingProxyType({} if memory_bytes is None else {"memory_bytes": where}),
        notes=("Bandwidth and rates are measured by `headrace calibrate`.",),
    )


def measured_machine(profile: Profile) -> Gpu:
    """The CPU host or the GPU that a profile was measured on, with its measured ceilings. Of a GPU
    in the tables all that was not measured is the table's."""
    ceilings = profile.ceilings
    if ceilings is None:
        raise ConfigError(
            f"The profile was measured on {profile.machine.get('device', 'another device')}, "
            "without its ceilings; expected bandwidth and rates.",
            "Run headrace calibrate to its end, or leave --profile out and name a GPU with --gpu.",
            param="profile",
        )
    where = Source(title="headrace calibrate", date=profile.date[:10])
    rates = {name: 2 * each for name, each in ceilings.multiplies_s.items()}  # multiply and add
    measured = ("memory_bytes", "bandwidth_bytes_s", *(f"flops.{name}" for name in rates))
    gpu = profile.machine.get("gpu")
    if isinstance(gpu, Mapping):
        row = _measured_gpu(gpu)
    else:
        cpu = str(profile.machine.get("cpu") or "CPU")
        row = replace(
            this_machine(),
            label=f"{cpu}, {profile.machine.get('threads', 1)} threads, measured",
            memory_bytes=profile.machine.get("memory_total_bytes"),
            sources=MappingProxyType({}),
            notes=(),
        )
    return replace(
        row,
        bandwidth_bytes_s=max(ceilings.read_bytes_s.values()),
        flops=MappingProxyType({**row.flops, **rates}),
        sources=MappingProxyType({**row.sources, **dict.fromkeys(measured, where)}),
    )


def _measured_gpu(facts: Mapping[str, object]) -> Gpu:
    """The table's row of that name, else one that has its memory and no more."""
    name, memory_bytes = str(facts.get("name")), int(str(facts.get("memory_total_bytes") or 0))
    try:
        row = find_gpu(name)
    except ConfigError:
        row = replace(this_machine(), vendor="NVIDIA", kind="gpu", sources=MappingProxyType({}))
    return replace(
        row,
        name=NAME,
        label=f"{name}, measured",
        family=NAME,
        aliases=("here",),
        memory_bytes=memory_bytes or row.memory_bytes,
        prices=(),
        notes=(),
    )


def memory_bytes_of(proc: Path) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return None if found is None else int(found[1]) * KIB


def cpu_name_of(proc: Path) -> str | None:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(proc / "cpuinfo"), re.MULTILINE)
    return None if found is None else found[1].strip()


def gpus_here() -> tuple[Seen, ...]:
    """The GPUs that nvidia-smi lists; none if there is no nvidia-smi or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    question = ["--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(
            [program, *question], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_smi(answer.stdout) if answer.returncode == 0 else ()


def read_smi(text: str) -> tuple[Seen, ...]:
    """Lines such as "NVIDIA H200, 143771"; others are left out."""
    rows = (line.rpartition(",") for line in text.splitlines())
    return tuple(
        Seen(driver_name=name.strip(), memory_bytes=int(mib) * MIB, gpu=_known(name, int(mib)))
        for name, _, mib in rows
        if mib.strip().isdecimal()
    )


def _known(driver_name: str, mib: int) -> Gpu | None:
    """The table's row, with the memory that this driver reports."""
    try:
        row = find_gpu(driver_name.strip())
    except ConfigError:
        return None
    where = Source(title="nvidia-smi on this machine", date=date.today().isoformat())
    sources: Mapping[str, Source] = MappingProxyType({**row.sources, "memory_bytes": where})
    return replace(row, memory_bytes=mib * MIB, sources=sources)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""
