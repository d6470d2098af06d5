"""How kernels are launched: with little work on the host, and perhaps before the last one ended.

Programmatic dependent launch: a kernel may start while the one before it ends. It must then call
`wait_for_previous` before it reads what earlier kernels of the stream wrote, and `let_next_start`
only after that; whatever came before the step's first kernel may be read at once. Knows no kernel.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


class Launch:
    """One kernel with its constants, launched many times.

    From the second time on, what Triton works out from the arguments (types, alignment, which of
    its compiled kernels that makes) is not worked out again, which costs more than the launch. So
    arguments may change only in ways that don't matter to that: tensors keep their type, and their
    alignment to 16 bytes where the kernel does not say that it assumes none; so do numbers.
    """

    again_direct = True  # to be set to False where Triton's compiled kernels can't be called so

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self._kernel = kernel
        self._named = {**constants, **options}
        # Constants come last in a kernel's signature, in an order that only the signature knows.
        self._constants = tuple(constants[name] for name in kernel.arg_names if name in constants)
        self._compiled: Any = None

    def __call__(self, programs: int, *args: Any) -> None:
        if self._compiled is not None and Launch.again_direct:
            self._compiled[(programs, 1, 1)](*args, *self._constants)
        else:  # the interpreter has nothing compiled: it comes here every time
            self._compiled = self._kernel[(programs,)](*args, **self._named)


def dependent_launch(wanted: bool) -> dict[str, Any]:
    """The launch option, only where wanted: the interpreter does not know it."""
    return {"launch_pdl": True} if wanted else {}


def exact_floats() -> dict[str, Any]:
    """The launch option by which a product is rounded before it is added to anything: results are
    then those of numpy. The interpreter does so anyway, and does not know the option."""
    return {} if triton.knobs.runtime.interpret else {"enable_fp_fusion": False}


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
