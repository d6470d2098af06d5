"""Which GPU there is, and whether it will do. Refuses in one line with what to change.

torch takes seconds to import: whether a driver is there at all is seen without it. Knows no model.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import ConfigError, MemoryFitError
from headrace.core.sizes import MIB, parse_share, show_bytes

LEAST_CAPABILITY = (8, 0)  # bf16 matrix units, asynchronous copies
FP8_CAPABILITY = (8, 9)
# Beside what the ledger counts: kernels' code, the library's handles, rounding of the allocator.
RESERVED_BYTES = 768 * MIB
_ELSEWHERE = "run with --device cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    free_bytes: int  # when it was looked at


def driver_is_present() -> bool:
    """Whether it is worth importing torch to look for a GPU."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def is_usable() -> bool:
    """For `--device auto`: a GPU that will do, and what it takes to use it."""
    if not driver_is_present():
        return False
    try:
        find_gpu()
    except ConfigError:
        return False
    return True


def find_gpu() -> Gpu:
    """The current GPU, or why there is none."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            raise _refuse(
                f"device is 'cuda', and {name} is not installed.",
                f"pip install 'headrace[cuda]', or {_ELSEWHERE}.",
            )
    import torch

    if torch.version.cuda is None:
        raise _refuse(
            f"device is 'cuda', and torch {torch.__version__} is built without CUDA.",
            f"Install a CUDA build of torch, or {_ELSEWHERE}.",
        )
    if not torch.cuda.is_available():
        raise _refuse(
            "device is 'cuda', and torch finds no CUDA device.",
            f"Check nvidia-smi and CUDA_VISIBLE_DEVICES, or {_ELSEWHERE}.",
        )
    index = torch.cuda.current_device()
    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    gpu = Gpu(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        total_bytes=total,
        free_bytes=free,
    )
    check_gpu(gpu)
    return gpu


def check_gpu(gpu: Gpu) -> None:
    if gpu.capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, c)) for c in (gpu.capability, LEAST_CAPABILITY))
        raise _refuse(
            f"{gpu.name} has compute capability {found}; {least} or newer is needed (bf16).",
            f"Use an Ampere GPU or newer, or {_ELSEWHERE}.",
        )


def budget_bytes(gpu: Gpu, gpu_memory: float | str) -> int:
    """What may be taken of the GPU: a fraction of it or bytes; never more than is free now."""
    share = parse_share(gpu_memory, "gpu_memory")
    wanted = int(share * gpu.total_bytes) if isinstance(share, float) else share
    if wanted > gpu.total_bytes:
        raise ConfigError(
            f"gpu_memory is {gpu_memory}; {gpu.name} has {show_bytes(gpu.total_bytes)}.",
            f"Set --gpu-memory {gpu.total_bytes // MIB}MiB or less, or a fraction such as 0.9.",
            param="gpu_memory",
        )
    return min(wanted, max(0, gpu.free_bytes - RESERVED_BYTES))


@contextlib.contextmanager
def taking(part: str) -> Iterator[None]:
    """Memory for one part of the ledger: if the GPU has not enough, that part is named."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info()
        room = max(0, free + torch.cuda.memory_allocated() - RESERVED_BYTES)
        raise short_of_memory(part, room) from error


def short_of_memory(part: str, room: int) -> MemoryFitError:
    """`room` is what the GPU has for all parts together."""
    remedy = f"Set --gpu-memory {room // MIB}MiB or less."
    if part == "weights" or room < MIB:
        remedy = "Choose a smaller model or --quantization int4, or free memory of the GPU."
    return MemoryFitError(
        f"The GPU ran out of memory while taking {part}; {show_bytes(room)} are there for all.",
        remedy,
        param="gpu_memory",
    )


def _refuse(cause: str, remedy: str) -> ConfigError:
    return ConfigError(cause, remedy, param="device")
