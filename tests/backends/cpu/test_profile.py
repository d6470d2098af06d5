"""The profile of a step: what it counts is worked out by hand here, how long things took is not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.backends.cpu import _native
from headrace.backends.cpu.ops import emit
from headrace.backends.cpu.profile import OperationProfile, Peaks, measure_peaks, read_profile
from headrace.backends.shared.recorder import RecordingOps
from headrace.models.spec import AttentionSpec, RopeSpec
from headrace.weights.tensor import Tensor

RandomTensor = Callable[..., Tensor]

ROPE = RopeSpec(inv_freq=tuple(0.5**i for i in range(8)))
ATTENTION = AttentionSpec(
    layer=0, heads=4, kv_heads=2, head_dim=16, scale=0.25, rope=ROPE, window=20
)


def make_program(random_tensor: RandomTensor, threads: int) -> _native.Program:
    """norm, product of 64 to 128, rope, attention (its keys and values written first)."""
    rng = np.random.default_rng(0)
    tensor = random_tensor(rng, "Q8_0", ATTENTION.qkv_width, 64)
    rows, columns = tensor.shape
    table = _native.Table("Q8_0", rows, columns, np.frombuffer(tensor.data, np.uint8))
    matrix = _native.Matrix([table], None, threads)
    kv = _native.KvPool(8, 1, 2, 16, "f16")
    program = _native.Program(_native.Pool(threads), kv, 64, 4, 128, None)
    ops = RecordingOps()
    normed = ops.norm(ops.input(64), np.ones(64, np.float32), 1e-5)
    result = ops.attention(ops.rope(ops.linear(normed, matrix), ATTENTION), ATTENTION)
    emit(program, ops.instructions, result)
    program.finish()
    return program


def run(program: _native.Program, rows: int) -> None:
    program.run([0] * rows, [rows], [0], [list(range(8))], [None], [0.0])


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_step_had_to_do(random_tensor: RandomTensor, threads: int) -> None:
    program = make_program(random_tensor, threads)
    run(program, 5)
    assert read_profile(program) == []  # off until it is asked for
    program.profile(True)
    for _ in range(3):
        run(program, 30)
    found = {operation.name: operation for operation in read_profile(program)}
    assert set(found) == {"norm, linear 64 x 128 u8", "rope, write kv", "attention"}
    assert all(o.calls == 3 and o.worked_s > 0 for o in found.values())
    # Threads work while thread 0 does, or it waits for them; clocks differ by a little.
    assert all(o.worked_s <= threads * o.seconds + 0.1 for o in found.values())

    product = found["norm, linear 64 x 128 u8"]
    assert product.multiplies == 3 * 30 * 64 * 128
    assert product.bytes == 3 * (64 * 128 + 64 // 32 * 128 * 2)  # codes and half-precision scales
    seen = sum(min(position + 1, 20) for position in range(30))
    attention = found["attention"]
    assert attention.multiplies == 3 * seen * 4 * 16 * 2  # scores, then values
    assert attention.bytes == 3 * seen * 2 * 2 * 16 * 2  # keys and values of 2 heads, halves
    assert (product.quantized, attention.quantized) == (True, False)

    assert read_profile(program) == []  # taken
    run(program, 1)
    assert len(read_profile(program)) == 3
    program.profile(False)
    run(program, 1)
    assert read_profile(program) == []


def test_a_profile_changes_no_result(random_tensor: RandomTensor) -> None:
    program = make_program(random_tensor, 2)
    x = np.random.default_rng(1).standard_normal((30, 64)).astype(np.float32)
    found = []
    for on in (False, True):
        program.profile(on)
        program.slot_view(0, 30)[:] = x
        run(program, 30)
        found.append(program.slot_view(0, 30).copy())  # the attention's, in the input's place
    np.testing.assert_array_equal(found[0], found[1])
    assert np.any(found[0] != x)
    with pytest.raises(ValueError, match="no such slot"):
        program.slot_view(2, 1)
    with pytest.raises(ValueError, match="no such slot"):
        program.slot_view(0, 65)


def test_the_bound_is_the_longer_of_computing_and_reading() -> None:
    peaks = Peaks(dots=100.0, floats=10.0, bytes=20.0)
    product = OperationProfile("linear 64 x 128 u8", 1, 9.0, 9.0, 400.0, 40.0)
    assert product.bound_s(peaks) == 4.0
    assert OperationProfile("linear 64 x 128 u4", 1, 9.0, 9.0, 100.0, 40.0).bound_s(peaks) == 2.0
    assert OperationProfile("linear 64 x 128 f16", 1, 9.0, 9.0, 400.0, 40.0).bound_s(peaks) == 40.0
    assert OperationProfile("attention", 1, 9.0, 9.0, 400.0, 40.0).bound_s(peaks) == 40.0


def test_peaks_of_every_path(path: str) -> None:
    """No figure is expected, but a loop that the compiler took away would be faster than light."""
    peaks = measure_peaks(1, 4 << 20, path)
    assert 0 < peaks.floats < 1e12
    assert 0 < peaks.dots < 1e13
    assert 0 < peaks.bytes < 1e13
    with pytest.raises(ValueError, match="too few bytes"):
        measure_peaks(1, 1000, path)
