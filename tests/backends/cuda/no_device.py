"""Triton without a GPU: kernels are bound and compiled as for one, and launching them does nothing.

`Watch(90)` puts a driver in the place of CUDA's. A launch then goes Triton's own way: its binder,
its compiler with the assembler of that architecture, its check of shared memory; only the call
into the device is ours, and looks at the arguments instead. What failed is noted and not raised,
so that one mistake does not hide the next. Must run without TRITON_INTERPRET.

Compiling takes a second, and most kernels differ little: constants that only add a load or say how
often can be named (`free`, `counts`). A launch that differs in nothing else from one that was
compiled is bound alone, if each of its free constants was compiled with some other.

Knows Triton; nothing of models and of which kernels there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction, mangle_type

# Of one program at most, when the kernel asks for it: what the driver would say.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
MOST_THREADS = 1024
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)  # in each direction of a grid
_LINES_SHOWN = 6  # of an error: a compiler's brings the whole kernel along


class Watch:
    """What was launched since `forget`. One in a process: compiled kernels remember its driver."""

    def __init__(
        self,
        architecture: int,
        *,
        free: frozenset[str] = frozenset(),  # arguments whatever they are
        counts: frozenset[str] = frozenset(),  # constants of which those above 1 are alike
    ) -> None:
        self.forget()
        self._free, self._counts = free, counts
        self._covered: set[object] = set()
        self._tried: set[tuple[object, ...]] = set()  # that failed: not worth trying again
        self._binding = False
        triton.runtime.driver.set_active(_driver(architecture, self._check))
        self._run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **named: self._launch(kernel, args, named)
        triton.knobs.runtime.jit_cache_hook = self._is_covered

    def forget(self) -> None:
        self.compiled: dict[str, set[str]] = {}  # kernel -> each one that was made of it
        self.failures: list[str] = []  # kernel, arguments and the error
        self.bound: dict[str, set[object]] = {}  # and not compiled
        self.direct_launches = 0  # past the binder, of a kernel that was compiled before

    def _launch(self, kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """In the place of JITFunction.run, which it calls."""
        constants = {k: v for k, v in named.items() if k not in ("grid", "warmup")}
        types = [_type_of(arg) for arg in args]
        attempt = (kernel, *types, *constants.items())
        if attempt in self._tried:
            return None
        self._binding = True
        try:
            found = self._run(kernel, *args, **named)
            if found is None:  # bound alone
                return None
            assert found.asm["cubin"], "nothing was compiled"
        except Exception as error:  # whatever it is, a user would meet it
            self._tried.add(attempt)
            self.fail(_describe(kernel, types, constants), error)
            return None
        finally:
            self._binding = False
        self.compiled.setdefault(name_of(kernel), set()).add(found.hash)
        return found

    def _is_covered(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks this before it compiles, and does not if the answer is yes."""
        name, names = name_of(fn.jit_function), fn.jit_function.arg_names
        given: dict[str, Any] = dict(compile["signature"])
        given |= {names[path[0]]: value for path, value in compile["constants"].items()}
        aligned = {names[path[0]] for path, found in compile["configs"][0].items() if found}
        alike = [
            (argument, min(2, value) if argument in self._counts else value, argument in aligned)
            for argument, value in given.items()
            if argument not in self._free
        ]
        needed: set[object] = {(name, compile["num_warps"], compile["num_stages"], str(alike))}
        needed |= {(name, argument, str(given[argument])) for argument in self._free & given.keys()}
        if needed <= self._covered:
            self.bound.setdefault(name, set()).add(key)
            return True
        self._covered |= needed
        return False

    def _check(self, source: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """In the place of the launch. Of a direct one nothing but this looks at the arguments: they
        must be such as the kernel was compiled for."""
        if not self._binding:
            self.direct_launches += 1
        try:
            check_launch(source, grid, args)
        except ValueError as error:
            self.fail(_describe(source.fn, source.signature.values(), {"grid": grid}), error)

    def fail(self, what: str, error: Exception) -> None:
        failure = f"{what}\n{type(error).__name__}: {_shorten(str(error))}"
        if failure not in self.failures:
            self.failures.append(failure)


def check_launch(source: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Refuse what a GPU would not do, or would do with other numbers than were given."""
    if not all(0 < n <= most for n, most in zip(grid, MOST_PROGRAMS, strict=True)):
        raise ValueError(f"a grid of {grid}; expected 1 to {MOST_PROGRAMS}")
    if len(args) != len(source.signature):
        raise ValueError(f"{len(args)} arguments; expected {len(source.signature)}")
    for number, ((name, kind), arg) in enumerate(zip(source.signature.items(), args, strict=True)):
        if kind == "constexpr":
            if arg != (constant := source.constants[number,]):
                raise ValueError(f"{name} is {arg!r}; it was compiled for {constant!r}")
        elif not kind.startswith("tensordesc") and (found := _type_of(arg)) != kind:
            raise ValueError(f"{name} is {found}; it was compiled for {kind}")
        elif source.attrs.get((number,)):  # the only attribute of an argument: a multiple of 16
            at = arg.data_ptr() if hasattr(arg, "data_ptr") else arg
            if isinstance(at, int) and at % 16:
                raise ValueError(f"{name} is {at}; it was compiled for multiples of 16")


def name_of(kernel: Any) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def _type_of(arg: Any) -> str:
    try:
        return str(mangle_type(arg))
    except TypeError:  # no kernel takes such a thing
        return type(arg).__name__


def _driver(architecture: int, check: Callable[..., None]) -> Any:
    """What Triton asks of a driver to compile and to launch."""

    def launcher(source: Any, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            # rest: stream, function, two kinds of metadata, two hooks; then the arguments
            check(source, (x, y, z), rest[6:])

        return launch

    limits = {"max_shared_mem": SHARED_BYTES[architecture]}
    return SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", architecture, 32),
        launcher_cls=launcher,
        utils=SimpleNamespace(
            get_device_properties=lambda device: limits,
            # module, function, registers, spills, threads at most: any that lets it be launched
            load_binary=lambda name, binary, shared, device: (1, 1, 0, 0, MOST_THREADS),
            unload_module=lambda module: None,
        ),
    )


def _describe(kernel: Any, types: Iterable[str], constants: dict[str, Any]) -> str:
    given = [f"{name}: {kind}" for name, kind in zip(kernel.arg_names, types, strict=False)]
    given += [f"{name}={value!r}" for name, value in constants.items()]
    return f"{name_of(kernel)}({', '.join(given)})"


def _shorten(error: str) -> str:
    """The lines that say what is wrong: the assembler's come first, those of Triton's compiler
    last, after the source."""
    lines = [line for line in error.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return "\n".join(telling[:_LINES_SHOWN] if "ptxas" in error else telling[-_LINES_SHOWN:])
