"""Which backends there are, and which one a device setting means.

A backend is imported when it is asked for, and not before. Knows their names; nothing of what they
do.
"""

from __future__ import annotations

from contextlib import suppress

from headrace.backends.backend import Backend
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import DeviceError

AUTO_ORDER = (Device.CUDA, Device.CPU)  # the first that this machine can run


def find_backend(name: Device) -> Backend:
    """By its name, which is not `auto`."""
    match name:
        case Device.CPU:
            from headrace.backends.cpu.backend import CpuBackend

            return CpuBackend()
        case Device.CUDA:
            from headrace.backends.cuda.backend import CudaBackend

            return CudaBackend()
        case Device.REFERENCE:
            from headrace.backends.reference.backend import ReferenceBackend

            return ReferenceBackend()
        case Device.AUTO:
            raise ValueError("auto is no backend: choose_backend chooses one")


def choose_backend(config: EngineConfig) -> Backend:
    """The one to compute with, checked: it can run here, and with these settings."""
    *others, last = AUTO_ORDER if config.device is Device.AUTO else (config.device,)
    for name in others:
        backend = find_backend(name)
        with suppress(DeviceError):  # of the machine; a setting that it refuses is told the user
            backend.check(config)
            return backend
    backend = find_backend(last)
    backend.check(config)
    return backend
