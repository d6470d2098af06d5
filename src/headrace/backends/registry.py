"""The backends by name, and which one a device setting selects.

A backend is only imported when it is selected. Knows their names; nothing of what they do.
"""

from __future__ import annotations

from contextlib import suppress

from headrace.backends.backend import Backend
from headrace.core.config import Device, EngineConfig
from headrace.core.errors import DeviceError

AUTO_ORDER = (Device.CUDA, Device.CPU)  # the first that this machine can run


def find_backend(name: Device) -> Backend:
    """The backend of that name, which must not be `auto`."""
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
            raise ValueError("auto is not a backend; use choose_backend")


def choose_backend(config: EngineConfig) -> Backend:
    """The backend to use. It was checked: it can run on this machine and with these settings."""
    *others, last = AUTO_ORDER if config.device is Device.AUTO else (config.device,)
    for name in others:
        backend = find_backend(name)
        with suppress(DeviceError):  # not other ConfigErrors: the user must see those
            backend.check(config)
            return backend
    backend = find_backend(last)
    backend.check(config)
    return backend
