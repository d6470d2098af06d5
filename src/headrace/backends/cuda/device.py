"""Finds the GPU and checks that it is supported; errors say in one line what to change.

torch takes seconds to import, so the driver is looked for without it. Knows no model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.backends.cuda.kv_sizes import check_kv_dtype
from headrace.core.config import KvDtype, Quantization
from headrace.core.errors import ConfigError, DeviceError, MemoryFitError
from headrace.core.sizes import MIB, parse_share, show_bytes
from headrace.core.version import install_extra

LEAST_CAPABILITY = (8, 0)  # bf16 matrix units, asynchronous copies
FP8_CAPABILITY = (8, 9)
DEPENDENT_CAPABILITY = (9, 0)  # a kernel may start before the previous one has ended
# Memory that the ledger does not count: kernels' code, library handles, the allocator's rounding.
RESERVED_BYTES = 768 * MIB
_ELSEWHERE = "run with --device cpu"
_ASKED = "device is 'cuda', and "  # begins the errors for a user who set --device cuda


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


def ranks_share_a_gpu() -> bool:
    """For tests on a machine with one GPU: all ranks on it, and sums through the host's memory."""
    return bool(os.environ.get("HEADRACE_TEST_RANKS_SHARE_GPU"))


def count_gpus() -> int:
    import torch

    return int(torch.cuda.device_count())


def check_ranks(ranks: int) -> None:
    """Each rank needs a GPU, and they must be alike: the slowest decides, the smallest limits."""
    import torch

    count = torch.cuda.device_count()
    if ranks_share_a_gpu():
        return
    if count < ranks:
        raise ConfigError(
            f"The model is divided among {ranks} ranks; torch finds {count} "
            f"GPU{'s' if count > 1 else ''}; expected one for each rank.",
            f"Set --tensor-parallel (times --pipeline-parallel) to {count} or less, or look at "
            "CUDA_VISIBLE_DEVICES.",
            param="tensor_parallel",
        )
    names = [torch.cuda.get_device_name(index) for index in range(ranks)]
    if len(set(names)) > 1:
        raise ConfigError(
            f"The model is divided among {ranks} ranks; the first {ranks} GPUs are "
            f"{', '.join(names)}; expected GPUs of one kind.",
            "Choose equal ones by CUDA_VISIBLE_DEVICES.",
            param="tensor_parallel",
        )


def find_gpu() -> Gpu:
    """The current GPU; raises DeviceError if there is none or it is not supported."""
    gpu = _current_gpu()
    check_gpu(gpu)
    return gpu


def _current_gpu() -> Gpu:
    """The GPU that torch would use, supported or not."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            raise _refuse(
                f"{_ASKED}{name} is not installed.",
                f"{install_extra('cuda')}; or {_ELSEWHERE}.",
            )
    try:
        import torch
    except (ImportError, OSError) as error:  # an incomplete installation: a library is missing
        raise _refuse(
            f"{_ASKED}torch can't be imported: {_first_line(error)}",
            f"{install_extra('cuda')} --force-reinstall; or {_ELSEWHERE}.",
        ) from error
    if torch.version.cuda is None:
        raise _refuse(
            f"{_ASKED}torch {torch.__version__} is built without CUDA.",
            f"Install a CUDA build of torch, or {_ELSEWHERE}.",
        )
    with warnings.catch_warnings(record=True) as said:  # torch reports problems as warnings
        warnings.simplefilter("always")
        is_there = torch.cuda.is_available()
    if not is_there:
        why = f" ({_first_line(said[-1].message)})" if said else ""
        raise _refuse(
            f"{_ASKED}torch finds no CUDA device{why}.",
            f"Check nvidia-smi and CUDA_VISIBLE_DEVICES, or {_ELSEWHERE}.",
        )
    try:
        index = torch.cuda.current_device()
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:  # in exclusive use, lost, or too new or old for the driver
        raise _refuse(
            f"{_ASKED}torch can't use the GPU: {_first_line(error)}",
            f"Check nvidia-smi, or {_ELSEWHERE}.",
        ) from error
    return Gpu(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        total_bytes=total,
        free_bytes=free,
    )


def describe() -> dict[str, object]:
    """For `headrace info`: the GPU and what it can do, or why it can't be used. Does not import
    torch if there is no driver."""
    if not driver_is_present():
        return {"usable": False, "why": "there is no NVIDIA driver"}
    found: dict[str, object] = {}
    refused: DeviceError | None = None
    try:
        gpu = _current_gpu()
        found = _describe_gpu(gpu)
        check_gpu(gpu)
        found |= abilities(gpu)
    except DeviceError as error:
        refused = error
    software = {"driver": driver_version(), **library_versions()}
    if refused is None:
        return {"usable": True, **found, **software}
    why = refused.cause.removeprefix(_ASKED)  # the user did not ask for it here
    return {"usable": False, "why": why, "remedy": refused.remedy, **found, **software}


def library_versions() -> dict[str, str | None]:
    """Versions of the packages that compile the kernels; None: not known, or not installed."""
    return {
        "torch": _version("torch"),
        "cuda": getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None),
        "triton": _version("triton"),
    }


def _describe_gpu(gpu: Gpu) -> dict[str, object]:
    return {
        "name": gpu.name,
        "memory_total_bytes": gpu.total_bytes,
        "memory_free_bytes": gpu.free_bytes,
        "capability": ".".join(map(str, gpu.capability)),
        "multiprocessors": gpu.multiprocessors,
    }


def abilities(gpu: Gpu) -> dict[str, object]:
    """What a supported GPU can do: values of --quantization and --kv-dtype."""
    kept = []
    for dtype in KvDtype:
        with contextlib.suppress(ConfigError):
            check_kv_dtype(dtype)
            kept.append(dtype.value)
    has_fp8 = gpu.capability >= FP8_CAPABILITY
    quantized = [each.value for each in Quantization if each is not Quantization.NONE]
    return {
        "fp8": has_fp8,
        "weights": ["bf16", *(name for name in quantized if has_fp8 or name != "fp8")],
        "kv_dtypes": [name for name in kept if has_fp8 or name != "fp8"],
        "graphs": True,  # every GPU that can run the kernels supports CUDA graphs
    }


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the kernel module from /proc, else from nvidia-smi."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", proc.read_text()):
            return found.group()
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def _version(package: str) -> str | None:
    """The module's own version, which includes its build; else that of the installed package."""
    if found := getattr(sys.modules.get(package), "__version__", None):
        return str(found)
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(said: object) -> str:
    """The first line of a library's error."""
    return str(said).strip().partition("\n")[0]


def check_gpu(gpu: Gpu) -> None:
    if gpu.capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, c)) for c in (gpu.capability, LEAST_CAPABILITY))
        raise _refuse(
            f"{gpu.name} has compute capability {found}; {least} or newer is needed (bf16).",
            f"Use an Ampere GPU or newer, or {_ELSEWHERE}.",
        )


def budget_bytes(gpu: Gpu, gpu_memory: float | str) -> int:
    """How much of the GPU's memory may be used: a fraction or bytes; at most what is free now."""
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
    """Allocates one part of the ledger; if the GPU runs out of memory, the error names the part."""
    import torch

    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info()
        room = max(0, free + torch.cuda.memory_allocated() - RESERVED_BYTES)
        raise short_of_memory(part, room) from error


def short_of_memory(part: str, room: int) -> MemoryFitError:
    """`room` is the memory that the GPU has for all parts together."""
    remedy = f"Set --gpu-memory {room // MIB}MiB or less."
    if part == "weights" or room < MIB:
        remedy = "Choose a smaller model or --quantization int4, or free memory of the GPU."
    return MemoryFitError(
        f"The GPU ran out of memory while allocating {part}; {show_bytes(room)} are available for "
        "everything.",
        remedy,
        param="gpu_memory",
    )


def _refuse(cause: str, remedy: str) -> DeviceError:
    return DeviceError(cause, remedy, param="device")
