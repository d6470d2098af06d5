"""What of this machine can be shared out between replicas: looked at once, at the start.

Knows /sys, cgroups and who counts GPUs; shares.py decides who gets what.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from headrace.backends.cuda.device import driver_is_present
from headrace.backends.shared import host
from headrace.core.children import child_environment, python_command
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import DeviceError
from headrace.replicas.shares import Machine

_CPUS = Path("/sys/devices/system/cpu")


def look_at_machine(config: EngineConfig) -> Machine:
    gpus = _gpus(config)
    if gpus:
        return Machine(gpus=gpus)
    from headrace.backends.cpu.machine import choose_threads

    most, _ = choose_threads()
    _, free = host.memory_bytes()
    can_pin = hasattr(os, "sched_setaffinity")
    return Machine(
        cores=allowed_cores() if can_pin else tuple((n,) for n in range(os.cpu_count() or 1)),
        most_threads=most,
        memory_bytes=free,
        can_pin=can_pin,
    )


def allowed_cores(sysfs: Path = _CPUS) -> tuple[tuple[int, ...], ...]:
    """The logical processors that this process may use, those of one core together."""
    if sys.platform == "win32":
        return tuple((number,) for number in range(os.cpu_count() or 1))
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = host.read_text(sysfs / f"cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or f"cpu{cpu}", []).append(cpu)
    return tuple(tuple(core) for core in cores.values())


def _gpus(config: EngineConfig) -> tuple[str, ...]:
    """Their names for CUDA_VISIBLE_DEVICES; none where the CPU computes."""
    if config.device in (Device.CPU, Device.REFERENCE):
        return ()
    if config.device is Device.AUTO and not driver_is_present():
        return ()
    words = [*python_command("headrace.replicas.gpus"), config.device, str(config.ranks)]
    done = subprocess.run(words, stdout=subprocess.PIPE, env=child_environment(), check=False)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise DeviceError(
            f"The process that looks for GPUs ended with {done.returncode}.", "See its message."
        ) from None
    if "cause" in found:
        raise DeviceError(found["cause"], found["remedy"])
    return tuple(found["gpus"])
