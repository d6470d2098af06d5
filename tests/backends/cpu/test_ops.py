"""Every native operation against the reference, on every path this machine can run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.ops import fuse
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.backends.shared.recorder import RecordingOps, Value, assign_slots, slot_values
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.dequantize import dequantize
from headrace.weights.tensor import FORMATS, Tensor

Floats = NDArray[np.float32]
RunOp = Callable[..., Floats]
RandomTensor = Callable[..., Tensor]

QUANTIZED = [name for name in FORMATS if name not in ("F32", "F16", "BF16")]


def table_of(tensor: Tensor) -> _native.Table:
    data = np.frombuffer(tensor.data, np.uint8)
    rows, columns = tensor.shape
    return _native.Table(tensor.format.name, rows, columns, data)


def matrix_of(*tensors: Tensor, bias: Floats | None = None) -> _native.Matrix:
    return _native.Matrix([table_of(t) for t in tensors], bias, 2)


def quantized_rows(x: Floats) -> NDArray[np.float64]:
    """What the kernels see of activations: int8 codes per 32, in the kernels' own arithmetic."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32)))
    groups = padded.reshape(len(x), -1, 32)
    top = np.abs(groups).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint((groups * inverse).astype(np.float32))
    values: NDArray[np.float64] = codes.astype(np.float64) * (top / np.float32(127))
    return values.reshape(len(x), -1)[:, : x.shape[1]]


@pytest.mark.parametrize("format_name", list(FORMATS))
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [
        (1, 48, 256),
        (2, 33, 512),
        (3, 7, 256),
        (5, 100, 768),
        (8, 17, 256),
        (13, 64, 1024),
        (99, 37, 512),  # a matrix unit's, where there is one
    ],
)
def test_linear_matches_the_exact_product(
    run_op: RunOp,
    random_tensor: RandomTensor,
    format_name: str,
    rows: int,
    outputs: int,
    inputs: int,
) -> None:
    rng = np.random.default_rng(rows * 1000 + outputs)
    tensor = random_tensor(rng, format_name, outputs, inputs)
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    got = run_op([x], lambda ops, v: ops.linear(v, matrix_of(tensor, bias=bias)))

    weights = dequantize(tensor).astype(np.float64)
    seen = quantized_rows(x) if format_name in QUANTIZED else x.astype(np.float64)
    expected = seen @ weights.T + bias
    # K formats multiply two factors, and the product is kept as a half: 2^-11 of each term.
    tolerance = 1e-3 if format_name.endswith("_K") else 2e-6
    size = np.abs(seen) @ np.abs(weights).T + np.abs(bias)
    assert np.all(np.abs(got - expected) <= tolerance * size)


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_linear_is_near_the_reference(
    run_op: RunOp, random_tensor: RandomTensor, format_name: str
) -> None:
    rng = np.random.default_rng(5)
    tensor = random_tensor(rng, format_name, 160, 768)
    x = rng.standard_normal((4, 768)).astype(np.float32)
    got = run_op([x], lambda ops, v: ops.linear(v, matrix_of(tensor)))
    expected = x @ dequantize(tensor).T
    # int8 activations cost about 9e-3 of the result's size; twice that would be a bug.
    assert np.linalg.norm(got - expected) < 0.018 * np.linalg.norm(expected)


@pytest.mark.parametrize("inputs", [32, 96, 160])
def test_linear_with_a_half_filled_last_record(
    run_op: RunOp, random_tensor: RandomTensor, inputs: int
) -> None:
    rng = np.random.default_rng(inputs)
    for format_name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "F32"):
        tensor = random_tensor(rng, format_name, 20, inputs)
        x = rng.standard_normal((3, inputs)).astype(np.float32)
        got = run_op([x], lambda ops, v, t=tensor: ops.linear(v, matrix_of(t)))
        seen = x if format_name == "F32" else quantized_rows(x)
        expected = seen @ dequantize(tensor).astype(np.float64).T
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_linear_of_parts_is_the_parts_side_by_side(
    run_op: RunOp, random_tensor: RandomTensor
) -> None:
    """Of one format (packed as one matrix), of several, and with parts that end inside a block."""
    rng = np.random.default_rng(9)
    x = rng.standard_normal((7, 256)).astype(np.float32)
    for kinds in (
        [("Q4_1", 32), ("Q4_1", 16), ("Q4_1", 24)],
        [("Q4_K", 48), ("Q6_K", 5), ("Q4_K", 40)],
        [("F16", 9), ("Q8_0", 9), ("Q8_0", 9)],
    ):
        parts = [random_tensor(rng, name, n, 256) for name, n in kinds]
        bias = rng.standard_normal(sum(n for _, n in kinds)).astype(np.float32)
        whole = run_op([x], lambda ops, v, p=parts, b=bias: ops.linear(v, matrix_of(*p, bias=b)))
        apart = [run_op([x], lambda ops, v, t=t: ops.linear(v, matrix_of(t))) for t in parts]
        np.testing.assert_array_equal(whole, np.concatenate(apart, axis=1) + bias)


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_a_row_is_the_same_alone_and_in_any_batch(
    run_op: RunOp, random_tensor: RandomTensor, format_name: str
) -> None:
    rng = np.random.default_rng(11)
    tensor = random_tensor(rng, format_name, 150, 512)
    x = rng.standard_normal((23, 512)).astype(np.float32)
    matrix = matrix_of(tensor)
    whole = run_op([x], lambda ops, v: ops.linear(v, matrix))
    for count in range(1, 15):
        part = run_op([x[:count]], lambda ops, v: ops.linear(v, matrix), threads=1 + count % 3)
        np.testing.assert_array_equal(part, whole[:count])


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_a_row_is_the_same_alone_and_among_many(
    run_op: RunOp, random_tensor: RandomTensor, format_name: str
) -> None:
    """Past a hundred rows a path may have another unit multiply them: the bits stay."""
    rng = np.random.default_rng(17)
    x = rng.standard_normal((177, 512)).astype(np.float32)
    matrix = matrix_of(random_tensor(rng, format_name, 150, 512))
    few = np.concatenate(
        [run_op([x[at : at + 3]], lambda ops, v: ops.linear(v, matrix)) for at in range(0, 177, 3)]
    )
    for first, last, threads in ((0, 177, 1), (0, 96, 2), (0, 97, 3), (40, 151, 2), (66, 177, 1)):
        many = run_op([x[first:last]], lambda ops, v: ops.linear(v, matrix), threads=threads)
        np.testing.assert_array_equal(many, few[first:last])


def test_many_rows_of_a_half_filled_last_record(run_op: RunOp, random_tensor: RandomTensor) -> None:
    rng = np.random.default_rng(18)
    for format_name, inputs in (("Q4_0", 32), ("Q4_1", 96), ("Q5_1", 160), ("Q8_0", 32)):
        matrix = matrix_of(random_tensor(rng, format_name, 20, inputs))
        x = rng.standard_normal((101, inputs)).astype(np.float32)
        many = run_op([x], lambda ops, v, m=matrix: ops.linear(v, m))
        few = run_op([x[:4]], lambda ops, v, m=matrix: ops.linear(v, m))
        last = run_op([x[-1:]], lambda ops, v, m=matrix: ops.linear(v, m))
        np.testing.assert_array_equal(many[:4], few)
        np.testing.assert_array_equal(many[-1:], last)


@pytest.mark.parametrize("rows", [1, 3, 5, 40, 130])
@pytest.mark.parametrize("format_name", ["Q4_1", "Q8_0", "F16"])
def test_fused_operations_are_the_single_ones_bit_for_bit(
    run_op: RunOp, random_tensor: RandomTensor, format_name: str, rows: int
) -> None:
    """A norm or gate before a product and a sum after it, in one program, against one program each;
    and with rows in between that somebody else wants too."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 256)).astype(np.float32)
    weight = rng.standard_normal(256).astype(np.float32)
    up, down = (
        matrix_of(random_tensor(rng, format_name, *shape), bias=bias)
        for shape, bias in (
            ((320, 256), rng.standard_normal(320).astype(np.float32)),
            ((256, 160), None),
        )
    )
    silu = Activation.SILU

    normed = run_op([x], lambda ops, v: ops.norm(v, weight, 1e-5))
    gate_up = run_op([normed], lambda ops, v: ops.linear(v, up))
    gated = run_op([gate_up], lambda ops, v: ops.gated(v, silu))
    out = run_op([gated], lambda ops, v: ops.linear(v, down))
    added = run_op([x, out], lambda ops, a, b: ops.add(a, b))
    other_way = run_op([out, x], lambda ops, a, b: ops.add(a, b))

    def mlp(ops: RecordingOps, v: Value) -> Value:
        return ops.linear(ops.gated(ops.linear(ops.norm(v, weight, 1e-5), up), silu), down)

    np.testing.assert_array_equal(run_op([x], mlp), out)
    np.testing.assert_array_equal(run_op([x], lambda ops, v: ops.add(v, mlp(ops, v))), added)
    np.testing.assert_array_equal(run_op([x], lambda ops, v: ops.add(mlp(ops, v), v)), other_way)

    def shared(ops: RecordingOps, v: Value) -> Value:
        n = ops.norm(v, weight, 1e-5)
        return ops.add(n, ops.linear(ops.gated(ops.linear(n, up), silu), down))

    expected = run_op([normed, out], lambda ops, a, b: ops.add(a, b))
    np.testing.assert_array_equal(run_op([x], shared), expected)


def test_what_is_fused(random_tensor: RandomTensor) -> None:
    """A layer's products take the norms, gates and sums around them; floats keep theirs apart."""
    rng = np.random.default_rng(0)
    weight = np.ones(64, np.float32)

    def slots(format_name: str) -> list[tuple[int, bool]]:
        up, down = (
            matrix_of(random_tensor(rng, format_name, *shape)) for shape in ((128, 64), (64, 64))
        )
        ops = RecordingOps()
        x = ops.input(64)
        gate_up = ops.linear(ops.norm(x, weight, 1e-5), up)
        result = ops.add(x, ops.linear(ops.gated(gate_up, Activation.SILU), down))
        taken = slot_values(assign_slots(fuse(ops.instructions, result), result))
        return [(value.width, value.head) for value in taken]

    assert slots("Q4_0") == [(64, False), (128, False)]  # x, and the sum in its place; gate and up
    assert slots("F32") == [
        (64, False),
        (64, False),
        (128, False),
    ]  # rows of a norm, then of a gate


def test_rows_beyond_the_shared_scratch(run_op: RunOp, random_tensor: RandomTensor) -> None:
    rng = np.random.default_rng(12)
    tensor = random_tensor(rng, "Q4_0", 40, 4096)
    x = rng.standard_normal((200, 4096)).astype(np.float32)
    matrix = matrix_of(tensor)
    whole = run_op([x], lambda ops, v: ops.linear(v, matrix))
    last = run_op([x[-2:]], lambda ops, v: ops.linear(v, matrix))
    np.testing.assert_array_equal(whole[-2:], last)


def test_activations_of_zero_and_of_extreme_size(
    run_op: RunOp, random_tensor: RandomTensor
) -> None:
    rng = np.random.default_rng(13)
    tensor = random_tensor(rng, "Q8_0", 32, 128)
    x = np.zeros((3, 128), np.float32)
    x[1] = 1e30
    x[2] = 1e-30
    got = run_op([x], lambda ops, v: ops.linear(v, matrix_of(tensor)))
    assert np.all(got[0] == 0)
    sums = dequantize(tensor).astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(got[1], sums * 1e30, rtol=1e-3, atol=1e26)
    assert np.all(np.isfinite(got))


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_embed(run_op: RunOp, random_tensor: RandomTensor, format_name: str) -> None:
    rng = np.random.default_rng(14)
    tensor = random_tensor(rng, format_name, 50, 256)
    tokens = [0, 49, 7, 7]
    got = run_op([], lambda ops: ops.embed(table_of(tensor), 1.5), tokens=tokens)
    np.testing.assert_allclose(got, dequantize(tensor)[tokens] * np.float32(1.5), rtol=1e-6)


def reference(rows: int) -> ReferenceOps:
    """For operations on rows, to which blocks and positions are nothing."""
    attention = AttentionSpec(
        layer=0, heads=1, kv_heads=1, head_dim=2, scale=1.0, rope=RopeSpec(inv_freq=(1.0,))
    )
    spec = ModelSpec(
        family="test",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        context_tokens=16,
        norm_eps=1e-5,
        attention=(attention,),
    )
    entry = Row(sequence_id=0, token_ids=[0] * rows, start=0, block_table=[0])
    return ReferenceOps(KvBlocks(spec, 1, 16), plan_of(entry))


@pytest.mark.parametrize("width", [16, 40, 576])
def test_norm(run_op: RunOp, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((5, width)).astype(np.float32) * 30
    weight = rng.standard_normal(width).astype(np.float32)
    got = run_op([x], lambda ops, v: ops.norm(v, weight, 1e-5))
    expected = reference(5).norm(x, ReferenceWeight(weight), 1e-5)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [16, 37, 1536])
def test_gated(run_op: RunOp, activation: Activation, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((4, 2 * width)) * 8).astype(np.float32)
    x[0, :4] = (-200, 200, 0, 1e-4)
    got = run_op([x], lambda ops, v: ops.gated(v, activation))
    expected = reference(4).gated(x, activation)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-5)  # 1 + tanh cancels


def test_add_and_softcap(run_op: RunOp) -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((3, 45)).astype(np.float32) * 50 for _ in range(2))
    np.testing.assert_array_equal(run_op([x, y], lambda ops, a, b: ops.add(a, b)), x + y)
    got = run_op([x], lambda ops, v: ops.softcap(v, 30.0))
    np.testing.assert_allclose(got, np.tanh(x / 30) * 30, rtol=2e-6, atol=1e-6)


def test_bad_arguments_are_refused_before_anything_runs() -> None:
    data = np.zeros(18, np.uint8)
    with pytest.raises(ValueError, match="bytes do not match"):
        _native.Table("Q4_0", 2, 32, data)
    with pytest.raises(ValueError, match="whole blocks"):
        _native.Table("Q4_0", 1, 33, data)
    with pytest.raises(ValueError, match="unknown weight format"):
        _native.Table("Q9_9", 1, 32, data)
    with pytest.raises(ValueError, match="can't run the path"):
        _native.Program(_native.Pool(1), None, 1, 1, 16, "mmx")
    with pytest.raises(ValueError, match="unknown KV dtype: fp8"):
        _native.KvPool(1, 1, 1, 16, "fp8")


def test_paths_match_the_processor() -> None:
    """The processor's own list says which paths there must be."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    paths = _native.paths()
    assert paths[-1] == "portable"
    if platform.machine() in ("aarch64", "arm64"):
        # Emulated, /proc/cpuinfo is the host's: tests/compilers knows which there must be.
        assert paths in (["neon-dotprod", "neon", "portable"], ["neon", "portable"])
        return
    assert ("avx2" in paths) == (" avx2 " in flags and " fma " in flags and " f16c " in flags)
    assert ("avx-vnni" in paths) == (" avx_vnni " in flags and " avx2 " in flags)
    assert ("avx512-vnni" in paths) == (" avx512_vnni " in flags and " avx512bw " in flags)
    # What is announced may still not run; what runs was announced.
    assert "amx" not in paths or (" amx_tile " in flags and " amx_int8" in flags)
