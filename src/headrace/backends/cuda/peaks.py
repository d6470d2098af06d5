"""What the GPU itself can do: bytes read and products, a second. Knows no model and no kernel.

Bytes are those of a long sum, which reads each once and writes nothing worth counting; products are
those of the vendor's own library on large squares of random numbers. The median of some rounds:
a GPU that computes for long lowers its clock, and that is what a server has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDS = 15
READ_BYTES = 4 << 30  # much more than any cache
SIDE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    read_bytes_s: float
    multiplies_s: dict[str, float]  # by type: bf16, and fp8 where the GPU has it


def measure_peaks() -> Peaks | None:
    """None without a GPU."""
    if not torch.cuda.is_available():
        return None
    with torch.inference_mode():
        products = {"bf16": _bf16_s()}
        fp8_s = _fp8_s()
        if fp8_s is not None:
            products["fp8"] = fp8_s
        read_s = _read_s()
    torch.cuda.empty_cache()
    return Peaks(
        read_bytes_s=read_s, multiplies_s={name: SIDE**3 / each for name, each in products.items()}
    )


def _read_s() -> float:
    """Bytes a second. Takes what is free, if that is less than would be best."""
    free_bytes, _ = torch.cuda.mem_get_info()
    count = min(READ_BYTES, free_bytes // 2) // 4
    values = torch.ones(count, dtype=torch.float32, device="cuda")
    return values.nbytes / _seconds(lambda: values.sum())


def _bf16_s() -> float:
    left, right = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return _seconds(lambda: left @ right)


def _fp8_s() -> float | None:
    if torch.cuda.get_device_capability() < (8, 9):
        return None
    left, right = (
        torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda").to(torch.float8_e4m3fn)
        for _ in range(2)
    )
    one = torch.ones((), dtype=torch.float32, device="cuda")
    multiply = _scaled_product(left, right.t(), one)
    try:
        return _seconds(multiply)
    except RuntimeError:  # a build of torch without these kernels for this GPU
        return None


def _scaled_product(
    left: torch.Tensor, right: torch.Tensor, scale: torch.Tensor
) -> Callable[[], torch.Tensor]:
    def multiply() -> torch.Tensor:
        return torch._scaled_mm(
            left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return multiply


def _seconds(work: Callable[[], object]) -> float:
    for _ in range(3):  # the library chooses a kernel, and the clock settles
        work()
    times = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)) / 1000)
    return statistics.median(times)
