"""Results to the last bit, against digests: the same on every path that fuses multiply and add, and
on the portable one wherever it was compiled, whichever compiler built them (docs/decisions/0011).

Inputs are made of whole numbers, from a bit generator that numpy promises never to change: nothing
in them depends on a library's arithmetic. Where a kernel's arithmetic was changed on purpose, the
failing test shows the new digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import DTypeLike, NDArray
from tests.backends.random_models import run_draws
from tests.plans import Draw, Row, plan_of, rows_of

from headrace.backends.cpu import _native
from headrace.backends.cpu.kv import KV_DTYPES
from headrace.backends.cpu.ops import emit
from headrace.backends.shared.recorder import RecordingOps, Value
from headrace.models.spec import Activation, AttentionSpec, RopeSpec
from headrace.weights.tensor import FORMATS, Tensor

Floats = NDArray[np.float32]
RunOp = Callable[..., Floats]
RandomTensor = Callable[..., Tensor]

PORTABLE = "portable"
DIGESTS: dict[str, dict[str, str]] = {
    "fused": {
        "BF16": "23471e185ea7507c",
        "F16": "b1643a0b4cf4bfd8",
        "F32": "2738a47e5a83dc3e",
        "Q4_0": "de2b6a0e769dc543",
        "Q4_1": "5e5c250d38bc5b05",
        "Q4_K": "9958dde91679d2d5",
        "Q5_0": "b473c9dd5f39fb1b",
        "Q5_1": "08b08239fa6f10b5",
        "Q5_K": "ac6961dee539a20a",
        "Q6_K": "4efc20fecdd72495",
        "Q8_0": "de6192f3942b168b",
        "add": "04f0c2fffca5f3c2",
        "attention, bf16": "171f8dea0fca1cfa",
        "attention, f16": "9d1b2cc9146f80b7",
        "attention, f32": "ee6e85cfc4e76602",
        "attention, int8": "47023a3c23aa9cf3",
        "draws": "3bf844fd334fff34",
        "gelu": "fbe1ac35acfa7766",
        "norm": "5278292b0c9f17a9",
        "rope": "aab6f90ae122d425",
        "rope, interleaved": "53c298c785ad589c",
        "silu": "4314d75278939781",
        "softcap": "0ca80cd78065d8a0",
    },
    "portable": {
        "BF16": "8909c5709e6aed49",
        "F16": "33f59b3f3f3dbe3f",
        "F32": "f9a162ea253a5a2e",
        "Q4_0": "625a166147ecd9b2",
        "Q4_1": "e745908bee77fa5c",
        "Q4_K": "d1c7a75b7ecd4373",
        "Q5_0": "e95a97d2d824d36e",
        "Q5_1": "c29e370213325153",
        "Q5_K": "a17dafe498ae7a8d",
        "Q6_K": "6a5e7ca4b1dfa91b",
        "Q8_0": "6a61135050198fb3",
        "add": "04f0c2fffca5f3c2",
        "attention, bf16": "4b7945238a2da3d7",
        "attention, f16": "6116c6d0bcf9d670",
        "attention, f32": "ef391813ae1c1179",
        "attention, int8": "bb7b57f1799a0c98",
        "draws": "3bf844fd334fff34",
        "gelu": "110860d6e8b8be27",
        "norm": "96c224c0f471fb9b",
        "rope": "6fe1a3fd0753a483",
        "rope, interleaved": "b40b5d04a77a1632",
        "silu": "4059e9d576b51822",
        "softcap": "50c30e2fd6be8a39",
    },
}


class Exact:
    """As much of a numpy Generator as random_tensor() uses, and the same numbers everywhere."""

    def __init__(self, seed: int) -> None:
        self.source = np.random.PCG64(seed)

    def _whole(self, bits: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
        raw = self.source.random_raw(int(np.prod(shape)))
        return (np.asarray(raw, np.uint64) >> np.uint64(64 - bits)).astype(np.int64).reshape(shape)

    def standard_normal(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Floats:
        """Nearly normal: the sum of four numbers of 20 bits, less their mean."""
        total = sum(self._whole(20, shape) for _ in range(4)) - (4 << 19)
        return (np.asarray(total) / 2**19.2).astype(np.float32)

    def integers(
        self, low: int, high: int, shape: tuple[int, ...], dtype: DTypeLike
    ) -> NDArray[np.uint8]:
        assert (low, high, dtype) == (0, 256, np.uint8)
        return self._whole(8, shape).astype(np.uint8)

    def uniform(self, low: float, high: float, count: int) -> NDArray[np.float64]:
        return low + (high - low) * (self._whole(20, (count,)) / 2**20)


def check(path: str, name: str, *results: NDArray[np.generic]) -> None:
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(r).tobytes() for r in results))
    found = digest.hexdigest()[:16]
    assert all(np.isfinite(np.asarray(r, np.float64)).all() for r in results)
    kind = PORTABLE if path == PORTABLE else "fused"
    assert found == DIGESTS[kind].get(name), f'"{name}": "{found}" is new ({kind})'


@pytest.mark.parametrize("format_name", list(FORMATS))
def test_products(run_op: RunOp, random_tensor: RandomTensor, path: str, format_name: str) -> None:
    rng = Exact(len(format_name))
    results = []
    for rows, outputs, inputs in ((1, 48, 256), (3, 33, 512), (6, 20, 768), (13, 64, 256)):
        tensor = random_tensor(rng, format_name, outputs, inputs)
        table = _native.Table(format_name, outputs, inputs, np.frombuffer(tensor.data, np.uint8))
        matrix = _native.Matrix([table], rng.standard_normal((outputs,)), 2)
        x = rng.standard_normal((rows, inputs)) * np.float32(3)
        results.append(run_op([x], lambda ops, v, m=matrix: ops.linear(v, m)))
    check(path, format_name, *results)


def attention_spec(
    heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    interleaved: bool = False,
) -> AttentionSpec:
    inv_freq = tuple(0.5**i for i in range(head_dim // 2))
    return AttentionSpec(
        layer=0,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        scale=0.125,
        rope=RopeSpec(inv_freq=inv_freq, scale=1.0, interleaved=interleaved),
        window=window,
        softcap=softcap,
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention(run_op: RunOp, path: str, kv_dtype: str) -> None:
    rng = Exact(5)
    results = []
    for a in (
        attention_spec(3, 64),
        attention_spec(8, 32, window=20),
        attention_spec(1, 40, window=5, softcap=30.0),
        attention_spec(2, 26),  # no whole number of any registers
    ):
        kv = _native.KvPool(6, 1, a.kv_heads, a.head_dim, kv_dtype)
        for start, count in ((0, 70), (70, 1), (71, 5)):
            x = rng.standard_normal((count, a.qkv_width)) * np.float32(2)
            results.append(
                run_op(
                    [x],
                    lambda ops, v, a=a: ops.attention(v, a),
                    positions=list(range(start, start + count)),
                    tables=[[3, 0, 5, 1, 4]],
                    kv=kv,
                )
            )
    check(path, f"attention, {kv_dtype}", *results)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(run_op: RunOp, path: str, interleaved: bool) -> None:
    rng = Exact(6)
    results = []
    for head_dim in (64, 24, 10):
        a = attention_spec(2, head_dim, interleaved=interleaved)
        x = rng.standard_normal((4, a.qkv_width))
        results.append(
            run_op(
                [x],
                lambda ops, v, a=a: ops.rope(v, a),
                positions=[0, 1, 7, 100],
                tables=[list(range(7))],
            )
        )
    check(path, f"rope{', interleaved' * interleaved}", *results)


ROWS: dict[str, Callable[..., Value]] = {
    "norm": lambda ops, v: ops.norm(v, Exact(9).standard_normal((150,)), 1e-5),
    "add": lambda ops, v: ops.add(v, v),
    "softcap": lambda ops, v: ops.softcap(v, 5.0),
    "silu": lambda ops, v: ops.gated(v, Activation.SILU),
    "gelu": lambda ops, v: ops.gated(v, Activation.GELU_TANH),
}


@pytest.mark.parametrize("name", list(ROWS))
def test_rows(run_op: RunOp, path: str, name: str) -> None:
    x = Exact(7).standard_normal((16, 150)) * np.float32(4)
    check(path, name, run_op([x], ROWS[name]))


def test_draws(path: str) -> None:
    rng = Exact(8)
    logits = rng.standard_normal((6, 1000)) * np.float32(5)
    entries = [
        Row(sequence_id=0, token_ids=[0], start=0, block_table=[0], draw=how)
        for temperature in (0.5, 1.0)
        for how in (
            Draw(temperature=temperature, uniform=0.625),
            Draw(temperature=temperature, uniform=0.375, top_p=0.875, min_p=0.01),
            Draw(temperature=temperature, uniform=0.875, top_k=40, typical_p=0.9),
        )
    ]
    program = _native.Program(_native.Pool(2), None, 6, 3, 16, path)
    ops = RecordingOps()
    value: Value = ops.input(1000)
    selected = ops.select(value)
    slots = emit(program, ops.instructions, selected)
    program.finish(slots[selected])
    program.slot_view(slots[value], 6)[:] = logits
    results = rows_of(run_draws(program, plan_of(*entries)))
    check(path, "draws", np.array([r.token_id for r in results], np.int32))
    # A logarithm is the C library's, and may end on another bit.
    reported = np.array([r.logprob for r in results])
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    expected = [row[r.token_id] for row, r in zip(exact, results, strict=True)]
    np.testing.assert_allclose(reported, expected, rtol=0, atol=1e-5)
