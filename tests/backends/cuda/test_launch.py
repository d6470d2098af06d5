"""Launches after the first go to the compiled kernel, with constants in the signature's order."""

from __future__ import annotations

from typing import Any

from headrace.backends.cuda.launch import Launch, dependent_launch


class Recorder:
    """Stands in for a kernel, or for what it compiles to: notes how it was launched."""

    arg_names = ("x", "n", "SMALL", "LARGE")

    def __init__(self, compiled: Recorder | None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> Recorder | None:
            self.calls.append((grid, args, named))
            return self.compiled

        return launch


def test_the_first_launch_compiles_and_others_do_not() -> None:
    compiled = Recorder(None)
    kernel = Recorder(compiled)
    launch = Launch(kernel, {"LARGE": 5, "SMALL": 4}, {"num_warps": 2})
    launch(7, "x", 1)
    launch(9, "y", 1)
    assert kernel.calls == [((7,), ("x", 1), {"SMALL": 4, "LARGE": 5, "num_warps": 2})]
    assert compiled.calls == [((9, 1, 1), ("y", 1, 4, 5), {})]


def test_without_a_compiled_kernel_all_launches_are_alike() -> None:
    kernel = Recorder(None)
    launch = Launch(kernel, {"LARGE": 5, "SMALL": 4}, dependent_launch(True))
    launch(7, "x", 1)
    launch(7, "x", 1)
    assert kernel.calls == [((7,), ("x", 1), {"SMALL": 4, "LARGE": 5, "launch_pdl": True})] * 2
