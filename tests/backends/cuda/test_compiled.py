"""Kernels are compiled for the GPUs that Headrace serves on, without one.

Other tests run kernels in Triton's interpreter, which knows nothing of its binder, its compiler and
shared memory: a kernel that passes there may fail at a user's first launch. compile_kernels.py does
the work, in a process of its own, as this one is the interpreter's. What was compiled is kept in
Triton's cache: the first run takes minutes, others seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
FAILURES_SHOWN = 6
MISTAKES = (  # kernel and error, of mistaken_kernels.py
    ("named_kernel(params: *fp32, BLOCK=16)", "failed to specialize argument of type: dict"),
    ("mixed_kernel(x: *fp32, y: *bf16, BLOCK=16)", "Both operands must be same dtype"),
    ("large_kernel(x: *bf16, y: *bf16, steps: i32, BLOCK=128)", "shared memory"),
    ("good_kernel", "2 arguments; expected 3"),
    ("good_kernel", "x is *fp16; it was compiled for *fp32"),
    ("good_kernel", "x is 4; it was compiled for multiples of 16"),
    ("good_kernel", "count is 17; it was compiled for multiples of 16"),
    ("good_kernel", "a grid of (0, 1, 1)"),
)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled to be run"),
    pytest.mark.timeout(900),
]


def compile_kernels(architecture: int, folder: Path, *flags: str) -> Any:
    report = folder / "report.json"
    environment = os.environ | {
        "HEADRACE_CACHE": str(folder),  # no choices that somebody measured
        "TRITON_DISABLE_LINE_INFO": "1",  # for debuggers; a fifth of the time
    }
    environment.pop("TRITON_INTERPRET", None)
    module = "tests.backends.cuda.compile_kernels"
    done = subprocess.run(
        [sys.executable, "-m", module, str(architecture), str(report), *flags],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_every_kernel_is_compiled_as_it_is_launched(architecture: int, tmp_path: Path) -> None:
    found = compile_kernels(architecture, tmp_path)
    failures = found["failures"]
    shown = "\n\n".join(failures[:FAILURES_SHOWN])
    assert not failures, f"{len(failures)} launches fail on sm_{architecture}, such as\n\n{shown}"
    assert found["never_launched"] == [], "launch them in compile_kernels.py"
    assert found["direct_launches"] > 0


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_kernels(90, tmp_path_factory.mktemp("mistakes"), "--mistakes")


def test_mistakes_are_found(mistakes: Any) -> None:
    failures = mistakes["failures"]
    assert len(failures) == len(MISTAKES)
    for failure, (kernel, error) in zip(failures, MISTAKES, strict=True):
        assert kernel in failure
        assert error in failure
    assert [name.split(".")[-1] for name in mistakes["compiled"]] == ["good_kernel"]


def test_a_kernel_that_nobody_launched_is_found(mistakes: Any) -> None:
    """Here all of them; but not what only kernels call."""
    missing = mistakes["never_launched"]
    assert "headrace.backends.cuda.products.dot.dot_kernel" in missing
    assert "headrace.backends.cuda.step.prepare._prepare_kernel" in missing
    assert "headrace.backends.cuda.products.epilogue.finish" not in missing
