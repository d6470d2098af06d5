"""Programmatic dependent launch: a kernel may start while the one before it ends.

A kernel launched so must call `wait_for_previous` before it reads what earlier kernels of the
stream wrote; whatever came before the step's first kernel may be read at once. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def dependent_launch(wanted: bool) -> dict[str, Any]:
    """The launch option, only where wanted: the interpreter does not know it."""
    return {"launch_pdl": True} if wanted else {}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Until all kernels before this one have ended and what they wrote can be seen."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """The next kernel may be put on the device; it waits for this one's results itself."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
