"""Kernels that no GPU would run, for reasons that the interpreter does not see; and a good one.

For the test of what compiles Headrace's: it must tell them apart. Knows none of those.
"""

# Kernels are Triton's language in Python's syntax, which has no types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from headrace.backends.cuda.launch import Launch


@triton.jit
def good_kernel(x, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < count) + 1, mask=at < count)


@triton.jit
def named_kernel(params, BLOCK: tl.constexpr):
    """`params` is a local of Triton's binder, which takes its own for the argument."""
    at = tl.arange(0, BLOCK)
    tl.store(params + at, tl.load(params + at) + 1)


@triton.jit
def mixed_kernel(x, y, BLOCK: tl.constexpr):
    """Types that matrix units don't multiply."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(x + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def large_kernel(x, y, steps, BLOCK: tl.constexpr):
    """More in flight than shared memory holds."""
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for step in tl.range(0, steps, num_stages=8):
        ahead = at + step * BLOCK * BLOCK
        total = tl.dot(tl.load(x + ahead), tl.load(y + ahead), total)
    tl.store(x + at, total.to(x.dtype.element_ty))


def _values(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype, device="meta")


def _good() -> None:
    launch = Launch(good_kernel, {"BLOCK": 16}, {})
    for _ in range(2):
        launch(1, _values(16), 16)


def _named() -> None:
    named_kernel[(1,)](_values(16), BLOCK=16)


def _mixed() -> None:
    mixed_kernel[(1,)](_values(256), _values(256, torch.bfloat16), BLOCK=16)


def _large() -> None:
    x = _values(128 * 128, torch.bfloat16)
    large_kernel[(1,)](x, x, 8, BLOCK=128)


def _none() -> None:
    good_kernel[(0,)](_values(16), 16, BLOCK=16)


def _again(*args: Any) -> Callable[[], None]:
    """Past the binder, with what the compiled kernel was not compiled for."""
    return partial(_launch_twice, *args)


def _launch_twice(*args: Any) -> None:
    launch = Launch(good_kernel, {"BLOCK": 16}, {})
    launch(1, _values(16), 16)
    launch(1, *args)


SCENES: dict[str, Callable[[], None]] = {
    "good": _good,
    "a name of the binder's": _named,
    "types": _mixed,
    "shared memory": _large,
    "too few arguments": _again(_values(16)),
    "another type": _again(_values(16, torch.float16), 16),
    "another alignment": _again(_values(17)[1:], 16),
    "another number": _again(_values(16), 17),
    "no programs": _none,
}
