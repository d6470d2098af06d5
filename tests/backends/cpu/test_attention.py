"""Rope, attention and the KV pool in every type, against the reference, on every path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.kv import KV_DTYPES, kv_bytes_per_token
from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight
from headrace.backends.shared.recorder import RecordingOps, Value
from headrace.models.spec import AttentionSpec, ModelSpec, RopeSpec

Floats = NDArray[np.float32]
RunOp = Callable[..., Floats]


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


def entry(count: int, start: int = 0, table: list[int] | None = None, number: int = 0) -> Row:
    return Row(sequence_id=number, token_ids=[0] * count, start=start, block_table=table or [0])


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
    ops = ReferenceOps(KvBlocks(spec_of(a), 1, 16), plan_of(*entries))
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
        torch = pytest.importorskip("torch")  # not in the environment of an emulated processor
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

    def write(
        self, layer: int, table: Sequence[int], start: int, keys: Floats, values: Floats
    ) -> None:
        kept = as_kept(keys, self.kv_dtype), as_kept(values, self.kv_dtype)
        super().write(layer, table, start, *kept)


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
        expected = ReferenceOps(blocks, plan_of(*entries)).attention(x, a)
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
    expected = ReferenceOps(KvBlocks(spec_of(a), 7, 16), plan_of(*entries)).attention(x, a)
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
    return ReferenceOps(blocks, plan_of(entry(len(x)))).attention(x, a)


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
