"""The device behind the engine: its peaks, and on a GPU its memory and how busy it is now.

Peaks come from a profile that `headrace calibrate` wrote (--profile), else from the table of GPUs;
without either there are none, and no share of them is given. On a GPU a thread asks nvidia-smi
every few seconds, so that no request ever waits for it. Knows neither requests nor metric names.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.doctor.local import gpus_now
from headrace.doctor.observation import GpuNow
from headrace.hardware.gpus import Gpu
from headrace.hardware.profile import load_profile
from headrace.hardware.this_machine import gpus_here, measured_machine

POLL_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most the device can do, a second."""

    flops_s: float
    bytes_s: float
    source: str


class DeviceWatch:
    def __init__(self, profile: str | None = None) -> None:
        """Raises ConfigError for a profile that can't be used."""
        machine = None if profile is None else measured_machine(load_profile(Path(profile)))
        self.peaks = None if machine is None else peaks_of(machine)
        self.gpus: tuple[GpuNow, ...] = ()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def watch_gpus(self) -> None:
        """Called once the engine is known to run on a GPU; more calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="headrace-gpus", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def _poll(self) -> None:
        if self.peaks is None:
            self.peaks = _listed_peaks()
        while not self._ended.is_set():
            self.gpus = gpus_now()
            self._ended.wait(POLL_S)


def peaks_of(machine: Gpu) -> Peaks | None:
    """Of one device: the rate of 16-bit products on a GPU, the highest of those measured on a
    CPU."""
    rates = machine.flops
    rate = rates.get("bf16") or rates.get("fp16") or max(rates.values(), default=None)
    if rate is None or machine.bandwidth_bytes_s is None:
        return None
    return Peaks(flops_s=rate, bytes_s=machine.bandwidth_bytes_s, source=machine.label)


def _listed_peaks() -> Peaks | None:
    """Of the GPU here; None where there are different ones, since one of them runs the engine."""
    try:
        known = {seen.gpu.name: seen.gpu for seen in gpus_here() if seen.gpu is not None}
    except HeadraceError:
        return None
    return peaks_of(*known.values()) if len(known) == 1 else None
