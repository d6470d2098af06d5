"""How kernels are launched: with little work on the host, and with programmatic dependent launch.

Programmatic dependent launch: a kernel may start while the previous one is still running. It must
then call `wait_for_previous` before it reads what earlier kernels of the stream wrote, and
`let_next_start` only after that. Memory written before the step's first kernel may be read at once.
Knows no particular kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


class Launch:
    """One kernel with its constants, launched many times.

    From the second launch on, Triton's analysis of the arguments (types, alignment, which compiled
    kernel to use) is skipped, because it costs more than the launch. So arguments may only change
    in ways that do not affect it: tensors and numbers keep their type, and their alignment to 16
    unless the kernel says that it assumes none.
    """

    again_direct = True  # set to False if this Triton's compiled kernels can't be called directly

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._named = {**constants, **options}
        # Constants come last in a kernel's signature, in the signature's order.
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: Any = None

    def __call__(self, programs: int, *args: Any) -> None:
        if self._compiled is not None and Launch.again_direct:
            self._compiled[(programs, 1, 1)](*args, *self._constants)
        else:  # the interpreter compiles nothing, so it always comes here
            self._compiled = self._kernel[(programs,)](*args, **self._named)


def dependent_launch(wanted: bool) -> dict[str, Any]:
    """The launch option, if wanted: the interpreter does not know it."""
    return {"launch_pdl": True} if wanted else {}


def exact_floats() -> dict[str, Any]:
    """The launch option that turns off fused multiply-adds, so that results are those of numpy. The
    interpreter has none, and does not know the option."""
    return {} if triton.knobs.runtime.interpret else {"enable_fp_fusion": False}


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Waits until all earlier kernels have ended and their writes are visible."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Allows the next kernel to start; it waits for this one's results itself."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
