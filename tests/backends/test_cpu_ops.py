"""Every native operation against the reference, on every path this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headrace.backends.cpu import _native
from headrace.backends.cpu.kv import KV_DTYPES, kv_bytes_per_token
from headrace.backends.cpu.ops import RecordingOps, Value
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.core.step import StepEntry
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
    [(1, 48, 256), (2, 33, 512), (3, 7, 256), (5, 100, 768), (8, 17, 256), (13, 64, 1024)],
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


@pytest.mark.parametrize("width", [16, 40, 576])
def test_norm(run_op: RunOp, width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.standard_normal((5, width)).astype(np.float32) * 30
    weight = rng.standard_normal(width).astype(np.float32)
    got = run_op([x], lambda ops, v: ops.norm(v, weight, 1e-5))
    expected = reference([entry(5)]).norm(x, ReferenceWeight(weight), 1e-5)
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [16, 37, 1536])
def test_gated(run_op: RunOp, activation: Activation, width: int) -> None:
    rng = np.random.default_rng(width)
    x = (rng.standard_normal((4, 2 * width)) * 8).astype(np.float32)
    x[0, :4] = (-200, 200, 0, 1e-4)
    got = run_op([x], lambda ops, v: ops.gated(v, activation))
    expected = reference([entry(4)]).gated(x, activation)
    np.testing.assert_allclose(got, expected, rtol=3e-6, atol=3e-5)  # 1 + tanh cancels


def test_add_and_softcap(run_op: RunOp) -> None:
    rng = np.random.default_rng(3)
    x, y = (rng.standard_normal((3, 45)).astype(np.float32) * 50 for _ in range(2))
    np.testing.assert_array_equal(run_op([x, y], lambda ops, a, b: ops.add(a, b)), x + y)
    got = run_op([x], lambda ops, v: ops.softcap(v, 30.0))
    np.testing.assert_allclose(got, np.tanh(x / 30) * 30, rtol=2e-6, atol=1e-6)


def attention_spec(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
    rotated: int | None = None,
) -> AttentionSpec:
    half = (rotated or head_dim) // 2
    inv_freq = tuple(10000.0 ** (-i / half) for i in range(half))
    return AttentionSpec(
        layer=1,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(inv_freq=inv_freq, scale=1.25, interleaved=interleaved),
        window=window,
        softcap=softcap,
    )


def entry(count: int, start: int = 0, table: list[int] | None = None, number: int = 0) -> StepEntry:
    return StepEntry(
        sequence_id=number, token_ids=[0] * count, start=start, block_table=table or [0]
    )


def reference(entries: list[StepEntry], blocks: KvBlocks | None = None) -> ReferenceOps:
    return ReferenceOps(blocks or KvBlocks(spec_of(attention_spec(1, 1, 2)), 1, 16), entries)


def spec_of(attention: AttentionSpec) -> ModelSpec:
    return ModelSpec(
        family="test",
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        context_tokens=4096,
        norm_eps=1e-5,
        attention=(attention, attention),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 12])
def test_rope_and_head_norm(run_op: RunOp, interleaved: bool, rotated: int | None) -> None:
    rng = np.random.default_rng(21)
    a = attention_spec(4, 2, 24, interleaved=interleaved, rotated=rotated)
    x = rng.standard_normal((6, a.qkv_width)).astype(np.float32)
    q, k = (rng.standard_normal(24).astype(np.float32) for _ in range(2))
    entries = [entry(3, 1000), entry(3, 0)]

    def record(ops: RecordingOps, v: Value) -> Value:
        return ops.rope(ops.head_norm(v, q, k, a), a)

    got = run_op([x], record, positions=[1000, 1001, 1002, 0, 1, 2], tables=[list(range(80))])
    ops = reference(entries)
    normed = ops.head_norm(x, ReferenceWeight(q), ReferenceWeight(k), a)
    np.testing.assert_allclose(got, ops.rope(normed, a), rtol=1e-5, atol=2e-6)


SHAPES = [
    attention_spec(9, 3, 64),
    attention_spec(8, 1, 32, window=20),
    attention_spec(4, 4, 16, softcap=5.0),
    attention_spec(7, 1, 40, window=5, softcap=30.0),
    attention_spec(12, 2, 128),
]


def as_kept(x: Floats, kv_dtype: str) -> Floats:
    """What a pool keeps of keys or values, [..., head_dim], in arithmetic of its own."""
    if kv_dtype == "f32":
        return x
    if kv_dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if kv_dtype == "bf16":  # torch rounds to nearest even, as the kernels should
        found: Floats = torch.from_numpy(x.copy()).to(torch.bfloat16).to(torch.float32).numpy()
        return found
    exact = x.astype(np.float64)
    scales = np.abs(exact).max(axis=-1, keepdims=True) / 127
    kept: NDArray[np.float64] = np.rint(exact / scales) * scales
    return kept.astype(np.float32)


class KeptBlocks(KvBlocks):
    """The reference's blocks, holding what a pool of another type would."""

    def __init__(self, a: AttentionSpec, total_blocks: int, kv_dtype: str) -> None:
        super().__init__(spec_of(a), total_blocks, 16)
        self.kv_dtype = kv_dtype

    def write(self, layer: int, entry: StepEntry, keys: Floats, values: Floats) -> None:
        super().write(layer, entry, as_kept(keys, self.kv_dtype), as_kept(values, self.kv_dtype))


@pytest.mark.parametrize("a", SHAPES, ids=lambda a: f"{a.heads}x{a.kv_heads}x{a.head_dim}")
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_over_scattered_blocks(run_op: RunOp, a: AttentionSpec, kv_dtype: str) -> None:
    """Two sequences in scattered blocks, a first chunk and a second one, in one pool. The reference
    keeps the same rounded keys and values, so that what is left is float32 arithmetic."""
    rng = np.random.default_rng(31)
    total = 24
    blocks = KeptBlocks(a, total, kv_dtype)
    kv = _native.KvPool(total, 2, a.kv_heads, a.head_dim, kv_dtype)
    numbers = rng.permutation(total).tolist()
    tables = [numbers[:10], numbers[10:20]]
    done = [0, 0]
    for counts in ((70, 3), (1, 40), (17, 1)):
        entries = [entry(n, done[i], tables[i], number=i) for i, n in enumerate(counts)]
        x = rng.standard_normal((sum(counts), a.qkv_width)).astype(np.float32)
        positions = [p for e in entries for p in range(e.start, e.start + len(e.token_ids))]
        owners = [i for i, n in enumerate(counts) for _ in range(n)]
        got = run_op(
            [x],
            lambda ops, v: ops.attention(v, a),
            positions=positions,
            entries=owners,
            tables=tables,
            kv=kv,
        )
        expected = ReferenceOps(blocks, entries).attention(x, a)
        if kv_dtype == "int8":
            # A value halfway between two codes may go either way: one code, of 254, of one value.
            np.testing.assert_allclose(got, expected, rtol=0, atol=2e-3)
            assert np.median(np.abs(got - expected)) < 1e-6
        else:
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        done = [d + n for d, n in zip(done, counts, strict=True)]


@pytest.mark.parametrize(("kv_dtype", "error"), [("f16", 4e-4), ("bf16", 3e-3), ("int8", 1.1e-2)])
def test_rounded_keys_and_values_stay_near_the_exact_ones(
    run_op: RunOp, kv_dtype: str, error: float
) -> None:
    """Against keys and values that were never rounded; bounds are half again what was seen."""
    a = attention_spec(4, 2, 64)
    x = np.random.default_rng(32).standard_normal((100, a.qkv_width)).astype(np.float32)
    # Heads of very different size: a scale for each head and token keeps the small ones.
    x[:, 4 * 64 : 5 * 64] *= 0.02
    x[:, 7 * 64 :] *= 100
    table = [6, 0, 3, 1, 4, 2, 5]
    got = run_op(
        [x],
        lambda ops, v: ops.attention(v, a),
        positions=list(range(100)),
        tables=[table],
        kv=_native.KvPool(7, 2, 2, 64, kv_dtype),
    )
    entries = [entry(100, 0, table)]
    expected = ReferenceOps(KvBlocks(spec_of(a), 7, 16), entries).attention(x, a)
    for head in range(4):
        part = slice(64 * head, 64 * head + 64)
        off = np.linalg.norm(got[:, part] - expected[:, part])
        assert off < error * np.linalg.norm(expected[:, part])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("at", [3, 30], ids=["key", "value"])
def test_what_is_not_finite_is_not_hidden(
    run_op: RunOp, kv_dtype: str, bad: float, at: int
) -> None:
    """The runner reports logits that are not numbers: rounding must not make numbers of them."""
    a = attention_spec(1, 1, 24)
    x = np.random.default_rng(35).standard_normal((18, a.qkv_width)).astype(np.float32)
    x[5, 24 + at] = bad
    got = run_op(
        [x],
        lambda ops, v: ops.attention(v, a),
        positions=list(range(18)),
        tables=[[1, 0]],
        kv=_native.KvPool(2, 2, 1, 24, kv_dtype),
    )
    assert np.all(np.isfinite(got[:5]))
    # An infinite key may win all the weight or none of it; either is finite for some queries.
    if at == 30 or np.isnan(bad) or kv_dtype == "int8":
        assert not np.any(np.all(np.isfinite(got[5:]), axis=1))


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-33, 1e30])
def test_int8_keys_and_values_of_zero_and_of_extreme_size(run_op: RunOp, size: float) -> None:
    a = attention_spec(1, 1, 16)
    x = np.random.default_rng(36).standard_normal((5, a.qkv_width)).astype(np.float32)
    x[:, 32:] *= np.float32(size)
    got = run_op(
        [x],
        lambda ops, v: ops.attention(v, a),
        positions=list(range(5)),
        tables=[[0]],
        kv=_native.KvPool(1, 2, 1, 16, "int8"),
    )
    expected = reference_attention(x, a)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.02 * size + 1e-29)


def reference_attention(x: Floats, a: AttentionSpec) -> Floats:
    blocks = KvBlocks(spec_of(a), 1, 16)
    return ReferenceOps(blocks, [entry(len(x))]).attention(x, a)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_ignores_what_lies_beyond_the_last_token(run_op: RunOp, kv_dtype: str) -> None:
    """A reused block holds another sequence's keys and values, perhaps NaN, after our tokens."""
    a = attention_spec(2, 1, 16)
    rng = np.random.default_rng(33)
    x = rng.standard_normal((20, a.qkv_width)).astype(np.float32)

    def run(kv: _native.KvPool, rows: Floats) -> Floats:
        return run_op(
            [rows],
            lambda ops, v: ops.attention(v, a),
            positions=list(range(len(rows))),
            tables=[[2, 0]],
            kv=kv,
        )

    clean = _native.KvPool(3, 2, 1, 16, kv_dtype)
    dirty = _native.KvPool(3, 2, 1, 16, kv_dtype)
    poisoned = np.full((32, a.qkv_width), np.nan, np.float32)
    run(dirty, poisoned)
    np.testing.assert_array_equal(run(dirty, x), run(clean, x))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_a_row_attends_the_same_in_any_chunk(run_op: RunOp, kv_dtype: str, head_dim: int) -> None:
    a = attention_spec(6, 2, head_dim, window=50)
    rng = np.random.default_rng(34)
    x = rng.standard_normal((90, a.qkv_width)).astype(np.float32)
    table = [[5, 0, 3, 1, 4, 2]]

    def run(chunks: list[int]) -> Floats:
        kv = _native.KvPool(6, 2, 2, head_dim, kv_dtype)
        parts = []
        for start, end in zip([0, *chunks], [*chunks, 90], strict=True):
            parts.append(
                run_op(
                    [x[start:end]],
                    lambda ops, v: ops.attention(v, a),
                    positions=list(range(start, end)),
                    tables=table,
                    kv=kv,
                )
            )
        return np.concatenate(parts)

    whole = run([])
    for chunks in ([1], [16, 32], [7, 8, 9, 80], list(range(1, 90))):
        np.testing.assert_array_equal(run(chunks), whole)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 40), (30, 3, 64)], ids=str)
def test_a_pool_takes_the_bytes_that_were_predicted(
    kv_dtype: str, shape: tuple[int, int, int]
) -> None:
    layers, kv_heads, head_dim = shape
    a = attention_spec(kv_heads, kv_heads, head_dim)
    spec = replace(spec_of(a), attention=(a,) * layers)
    pool = _native.KvPool(5, layers, kv_heads, head_dim, kv_dtype)
    assert pool.bytes == 5 * 16 * kv_bytes_per_token(spec, kv_dtype)
    by_hand = {"f32": 4 * head_dim, "f16": 2 * head_dim, "bf16": 2 * head_dim, "int8": head_dim + 4}
    assert kv_bytes_per_token(spec, kv_dtype) == 2 * layers * kv_heads * by_hand[kv_dtype]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_block_copies_are_whole_and_one_after_the_other(run_op: RunOp, kv_dtype: str) -> None:
    """1 to 4, then 4 to 2: block 2 is block 1. A sequence over the copies is the same."""
    a = attention_spec(2, 1, 24)
    rng = np.random.default_rng(37)
    kv = _native.KvPool(5, 2, 1, 24, kv_dtype)

    def run(rows: Floats, start: int, table: list[int]) -> Floats:
        return run_op(
            [rows],
            lambda ops, v: ops.attention(v, a),
            positions=list(range(start, start + len(rows))),
            tables=[table],
            kv=kv,
        )

    x, last = (rng.standard_normal((n, a.qkv_width)).astype(np.float32) for n in (20, 1))
    run(x, 0, [1, 3])
    expected = run(last, 20, [1, 3])
    kv.copy(np.array([(1, 4), (4, 2), (3, 0), (0, 0)], np.int32))
    for table in ([4, 0], [2, 0], [1, 3]):
        np.testing.assert_array_equal(run(last, 20, table), expected)
    run(rng.standard_normal((16, a.qkv_width)).astype(np.float32), 0, [1])
    np.testing.assert_array_equal(run(last, 20, [2, 0]), expected)  # a copy, not the same block
    assert np.any(run(last, 20, [1, 3]) != expected)

    for pair in ((0, 5), (5, 0), (-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="outside the pool"):
            kv.copy(np.array([(1, 2), pair], np.int32))
    np.testing.assert_array_equal(run(last, 20, [2, 0]), expected)  # 1 to 2 was not done either
    with pytest.raises(ValueError, match="a pair"):
        kv.copy(np.zeros((1, 3), np.int32))


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
    assert ("avx2" in paths) == (" avx2 " in flags and " fma " in flags and " f16c " in flags)
    assert ("avx512-vnni" in paths) == (" avx512_vnni " in flags and " avx512bw " in flags)
