"""The reference operations against torch's own functions, one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.plans import Row, plan_of

from headrace.backends.reference.ops import KvBlocks, ReferenceOps, ReferenceWeight, prepare
from headrace.models.dims import Dims, make_spec
from headrace.models.spec import Activation, AttentionSpec, ModelSpec, RopeSpec
from headrace.weights.tensor import FORMATS, Tensor
from headrace.weights.weight import Weight

Floats = NDArray[np.float32]
FREQUENCIES = (1.0, 0.5, 0.3, 0.01)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(
    *, window: int | None = None, interleaved: bool = False, head_dim: int = 8, scale: float = 1.0
) -> ModelSpec:
    dims = Dims(
        vocab_size=11, hidden_size=12, intermediate_size=10, layers=1, heads=6, kv_heads=2,
        head_dim=head_dim, context_tokens=256, norm_eps=1e-5,
    )  # fmt: skip
    rope = RopeSpec(inv_freq=FREQUENCIES, interleaved=interleaved, scale=scale)
    return make_spec("llama", dims, context_tokens=256, ropes=rope, windows=window)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def ops_for(spec: ModelSpec, *starts_and_counts: tuple[int, int]) -> ReferenceOps:
    entries = [
        Row(
            sequence_id=i, token_ids=[(i + t) % 11 for t in range(count)], start=start,
            block_table=list(range(10 * i + 9, 10 * i - 1, -1)),
        )
        for i, (start, count) in enumerate(starts_and_counts)
    ]  # fmt: skip
    return ReferenceOps(KvBlocks(spec, 40, 16), plan_of(*entries))


def close(found: Floats, wanted: torch.Tensor) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.numpy(), rtol=2e-5, atol=2e-6)


def f32_tensor(name: str, values: Floats) -> Tensor:
    return Tensor(name, FORMATS["F32"], values.shape, memoryview(values.tobytes()))


def test_weights_are_stacked_and_offset() -> None:
    a, b, bias = random(3, 4), random(2, 4, seed=1), random(3, seed=2)
    parts = (f32_tensor("a", a), f32_tensor("b", b))
    biases = (f32_tensor("c", bias), f32_tensor("d", bias[:2]))
    found = prepare(Weight(parts=parts, bias=biases, offset=1.0))
    np.testing.assert_array_equal(found.values, np.concatenate([a, b]) + 1)
    assert found.bias is not None
    np.testing.assert_array_equal(found.bias, [*bias, *bias[:2]])


def test_embed_norm_linear() -> None:
    ops = ops_for(make(), (0, 3), (5, 2))
    table, norm = random(11, 12), random(12, seed=1)
    x = ops.embed(ReferenceWeight(table), 2.0)
    close(x, torch.tensor(table)[[0, 1, 2, 1, 2]] * 2)
    wanted = torch.nn.functional.rms_norm(torch.tensor(x), (12,), torch.tensor(norm), 1e-5)
    close(ops.norm(x, ReferenceWeight(norm), 1e-5), wanted)
    matrix, bias = random(7, 12, seed=2), random(7, seed=3)
    wanted = torch.nn.functional.linear(torch.tensor(x), torch.tensor(matrix), torch.tensor(bias))
    close(ops.linear(x, ReferenceWeight(matrix, bias)), wanted)


def test_gated_and_softcap() -> None:
    ops = ops_for(make(), (0, 4))
    x = random(4, 20) * 4
    x[0, 0] = -200.0  # exp(200) is beyond float32
    gate, up = torch.tensor(x).chunk(2, dim=-1)
    close(ops.gated(x, Activation.SILU), torch.nn.functional.silu(gate) * up)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh")
    close(ops.gated(x, Activation.GELU_TANH), gelu * up)
    close(ops.softcap(x, 3.0), torch.tanh(torch.tensor(x) / 3) * 3)


def test_head_norm_leaves_values() -> None:
    spec = make()
    attention = spec.attention[0]
    ops, qkv = ops_for(spec, (0, 3)), random(3, attention.qkv_width)
    q_norm, k_norm = random(8, seed=1), random(8, seed=2)
    found = ops.head_norm(qkv, ReferenceWeight(q_norm), ReferenceWeight(k_norm), attention)
    heads = torch.tensor(qkv).view(3, 10, 8)
    each = [torch.tensor(q_norm)] * 6 + [torch.tensor(k_norm)] * 2
    normed = [
        torch.nn.functional.rms_norm(heads[:, i], (8,), weight, 1e-5)
        for i, weight in enumerate(each)
    ]
    close(found, torch.cat([*normed, heads[:, 8], heads[:, 9]], dim=-1))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("head_dim", [8, 12])
def test_rope_is_a_complex_rotation(interleaved: bool, head_dim: int) -> None:
    """Of the first 8 values of each head; a larger head keeps the rest."""
    spec = make(interleaved=interleaved, head_dim=head_dim, scale=1.3)
    attention = spec.attention[0]
    ops, qkv = ops_for(spec, (0, 2), (100, 3)), random(5, attention.qkv_width)
    found = ops.rope(qkv, attention).reshape(5, 10, head_dim)
    heads = torch.tensor(qkv).view(5, 10, head_dim)
    pairs = heads[..., :8].reshape(5, 10, *((4, 2) if interleaved else (2, 4)))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    positions = torch.tensor([0, 1, 100, 101, 102])
    turn = torch.polar(
        torch.full((5, 1, 4), 1.3), positions[:, None, None] * torch.tensor(FREQUENCIES)
    )
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    turned = (turned if interleaved else turned.transpose(-1, -2)).flatten(-2)
    wanted = torch.cat([turned, heads[..., 8:]], dim=-1)
    wanted[:, 8:] = heads[:, 8:]  # values do not turn
    close(found[:, 8:], wanted[:, 8:])
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 1, 5, 30])
def test_attention_is_torchs_over_shuffled_blocks(window: int | None) -> None:
    """Two sequences in chunks that straddle blocks; earlier chunks are read from the blocks."""
    spec = make(window=window)
    attention = spec.attention[0]
    blocks = KvBlocks(spec, 40, 16)
    texts = [random(50, attention.qkv_width), random(37, attention.qkv_width, seed=1)]
    tables = [[31, 4, 17, 8], [2, 39, 5]]
    found: list[list[Floats]] = [[], []]
    for cuts in ([(0, 13), (0, 20)], [(13, 14), (20, 37)], [(14, 50)]):
        entries = [
            Row(sequence_id=i, token_ids=[0] * (end - start), start=start, block_table=tables[i])
            for i, (start, end) in enumerate(cuts)
        ]
        rows = np.concatenate([texts[i][a:b] for i, (a, b) in enumerate(cuts)])
        out = ReferenceOps(blocks, plan_of(*entries)).attention(rows, attention)
        parts = np.split(out, np.cumsum([b - a for a, b in cuts])[:-1])
        for i, part in enumerate(parts):
            found[i].append(part)
    for text, parts_of in zip(texts, found, strict=True):
        close(np.concatenate(parts_of), torch_attention(text, attention))


def torch_attention(qkv: Floats, attention: AttentionSpec) -> torch.Tensor:
    n = len(qkv)
    heads = torch.tensor(qkv).view(n, 10, 8).transpose(0, 1)
    q, k, v = heads[:6], heads[6:8], heads[8:]
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (attention.window or n))
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=seen, scale=attention.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).reshape(n, -1)
