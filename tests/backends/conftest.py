"""What the backend tests share: random weights in every format, one operation at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.weights.tensor import FORMATS, Tensor

if TYPE_CHECKING:
    from headrace.backends.cpu import _native
    from headrace.backends.shared.recorder import Value

Floats = NDArray[np.float32]

# Where each quantized format keeps its half-precision factors in a block, and how large they are
# when values are about one.
_HALVES = {
    "Q4_0": {0: 0.35},
    "Q4_1": {0: 0.2, 2: 1.0},
    "Q5_0": {0: 0.2},
    "Q5_1": {0: 0.1, 2: 1.0},
    "Q8_0": {0: 0.025},
    "Q4_K": {0: 0.006, 2: 0.03},
    "Q5_K": {0: 0.003, 2: 0.03},
    "Q6_K": {208: 0.0015},
}


def _random_tensor(
    rng: np.random.Generator, format_name: str, rows: int, columns: int, scale: float = 1.0
) -> Tensor:
    """Values of about `scale`. Any bytes are valid codes; only the factors are drawn with care."""
    format_ = FORMATS[format_name]
    values = rng.standard_normal((rows, columns), np.float32) * np.float32(scale)
    if format_name == "F32":
        data = values.tobytes()
    elif format_name == "F16":
        data = values.astype(np.float16).tobytes()
    elif format_name == "BF16":
        data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        blocks = rows * columns // format_.block_values
        raw = rng.integers(0, 256, (blocks, format_.block_bytes), np.uint8)
        for at, size in _HALVES[format_name].items():
            factor = (rng.uniform(-size, size, blocks) * scale).astype(np.float16)
            raw[:, at : at + 2] = factor.view(np.uint8).reshape(-1, 2)
        data = raw.tobytes()
    return Tensor("w", format_, (rows, columns), memoryview(data))


@pytest.fixture(scope="session")
def random_tensor() -> Callable[..., Tensor]:
    return _random_tensor


def _paths() -> list[str]:
    """None where the native module was not built, as on a machine for the CUDA tests: the CPU's
    import it themselves, and say so."""
    try:
        from headrace.backends.cpu import _native
    except ImportError:
        return []
    return _native.paths()


@pytest.fixture(params=_paths())
def path(request: pytest.FixtureRequest) -> str:
    """Every kernel path that this machine can run."""
    name: str = request.param
    return name


RunOp = Callable[..., Floats]


@pytest.fixture
def run_op(path: str) -> RunOp:
    """run_op(inputs, record): write each input to a slot, run what `record(ops, *values)` records,
    and read its result."""
    from headrace.backends.cpu import _native
    from headrace.backends.cpu.ops import emit
    from headrace.backends.shared.recorder import RecordingOps

    def run(
        inputs: list[Floats],
        record: Callable[..., Value],
        *,
        tokens: list[int] | None = None,
        positions: list[int] | None = None,
        entries: list[int] | None = None,
        tables: list[list[int]] | None = None,
        kv: _native.KvPool | None = None,
        threads: int = 2,
    ) -> Floats:
        rows = len(inputs[0]) if inputs else len(tokens or ())
        pool = _native.Pool(threads)
        program = _native.Program(pool, kv, rows, 4, 4096, path)
        ops = RecordingOps()
        values = [ops.input(x.shape[1]) for x in inputs]
        result = record(ops, *values)
        slots = emit(program, ops.instructions, result)
        program.finish()
        for value, x in zip(values, inputs, strict=True):
            program.slot_view(slots[value], rows)[:] = x
        # Neighbouring rows of one sequence are one share of the step.
        places = list(zip(entries or [0] * rows, positions or [0] * rows, strict=True))
        firsts = [r for r, (e, p) in enumerate(places) if not r or places[r - 1] != (e, p - 1)]
        program.run(
            tokens or [0] * rows,
            [end - first for first, end in pairwise([*firsts, rows])],
            [places[first][1] for first in firsts],
            [(tables or [[0]])[places[first][0]] for first in firsts],
            [None] * len(firsts),
            [0.0] * len(firsts),
        )
        return program.slot_view(slots[result], rows).copy()

    return run
