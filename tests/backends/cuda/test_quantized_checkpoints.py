"""Quantized checkpoints and random weights on the device: loaded they are the values that the file
stands for, and whole models answer as the reference does."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.plans import Row, plan_of, rows_of
from tests.weights.packers import Packed, checkpoint, pack_awq, pack_eight_bit, pack_gptq

from headrace.backends.cuda.layout import shape_weights, weight_bytes
from headrace.backends.cuda.loading import Loader, prepared_bytes
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import Matrix, dequantize_matrix
from headrace.backends.cuda.runner import CudaRunner
from headrace.backends.reference.runner import ReferenceRunner
from headrace.core.step import Runner, StepPlan
from headrace.weights.dequantize import dequantize
from headrace.weights.describe import describe_file
from headrace.weights.dummy import DummyFolder
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import Beside, CodeKind, QuantizedMatrix, QuantizedTensor
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)

RNG = np.random.default_rng(5)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"g": {"weights": {"num_bits": 8, "strategy": "channel"}}},
}
FP8 = {"quant_method": "fp8"}


def in_one_order(outputs: int, inputs: int) -> Packed:
    """Act-order as GPTQ has it: matrices over the same inputs agree about their order."""
    return pack_gptq(RNG, outputs, inputs, 32, act_order=True, order_seed=inputs)


def in_blocks(outputs: int, inputs: int) -> Packed:
    shape = (-(-outputs // 128), -(-inputs // 128))
    return pack_eight_bit(
        RNG, outputs, inputs, scale="weight_scale_inv", shape=shape, block=(128, 128)
    )


Kind = tuple[Callable[[int, int], Packed], dict[str, Any], dict[str, MatrixFormat]]


def all_of(format_: MatrixFormat) -> dict[str, MatrixFormat]:
    return dict.fromkeys(("qkv", "attn_out", "gate_up", "down"), format_)


# What a matrix becomes, by role: its own codes, or floats where no kernel has its layout.
KINDS: dict[str, Kind] = {
    "awq": (lambda o, i: pack_awq(RNG, o, i, 32), AWQ, all_of(MatrixFormat.INT4)),
    "awq, small groups": (
        lambda o, i: pack_awq(RNG, o, i, 16),
        AWQ | {"group_size": 16},
        all_of(MatrixFormat.F32),
    ),
    "gptq": (in_one_order, GPTQ, all_of(MatrixFormat.INT4)),
    "gptq, an order each": (
        lambda o, i: pack_gptq(RNG, o, i, 32, act_order=True),
        GPTQ,
        all_of(MatrixFormat.INT4) | {"qkv": MatrixFormat.F32, "gate_up": MatrixFormat.F32},
    ),
    "gptq_v2, symmetric": (
        lambda o, i: pack_gptq(RNG, o, i, 32, symmetric=True, less_one=False),
        GPTQ | {"checkpoint_format": "gptq_v2"},
        all_of(MatrixFormat.INT4),
    ),
    "gptq, 8 bits": (
        lambda o, i: pack_gptq(RNG, o, i, 32, bits=8),
        GPTQ | {"bits": 8},
        all_of(MatrixFormat.F32),
    ),
    "int8": (
        lambda o, i: pack_eight_bit(RNG, o, i, dtype="int8", shape=(o, 1)),
        INT8,
        all_of(MatrixFormat.INT8),
    ),
    "fp8, a tensor": (lambda o, i: pack_eight_bit(RNG, o, i), FP8, all_of(MatrixFormat.FP8)),
    "fp8, an output": (
        lambda o, i: pack_eight_bit(RNG, o, i, shape=(o, 1)),
        FP8,
        all_of(MatrixFormat.FP8),
    ),
    # The parts of qkv and gate_up end inside a block, or each is a block of its own.
    "fp8, a block": (in_blocks, FP8 | {"weight_block_size": [128, 128]}, {}),
}


def values_of(matrix: Matrix) -> np.ndarray[Any, Any]:
    """[outputs, columns] as the weight has them: gate and up apart, columns in their places."""
    found = dequantize_matrix(matrix).cpu().numpy()
    if matrix.permutation is not None:
        moved = np.empty_like(found)
        moved[:, matrix.permutation.cpu().numpy()] = found
        found = moved
    if matrix.gated:
        found = np.concatenate([found[0::2], found[1::2]])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_values_are_the_files(tmp_path: Path, device: torch.device, kind: str) -> None:
    pack, config, formats = KINDS[kind]
    checkpoint(pack).save(tmp_path, config)
    with open_weights(tmp_path) as file:
        weights = find_weights(describe_file(file)[1], file)
        prepared = Loader(device, torch.float32, release=file.release).load(weights)
        for layer, found in zip(weights.layers, prepared.layers, strict=True):
            for role in ("qkv", "attn_out", "gate_up", "down"):
                matrix = getattr(found, role)
                expected = np.concatenate([dequantize(p) for p in getattr(layer, role).parts])
                assert np.array_equal(values_of(matrix), expected), role
                assert matrix.format is formats.get(role, matrix.format), role


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_predicted_is_loaded_and_its_sources_are_let_go(
    tmp_path: Path, device: torch.device, kind: str
) -> None:
    pack, config, _ = KINDS[kind]
    checkpoint(pack).save(tmp_path, config)
    released: list[str] = []

    def release(tensor: Tensor) -> None:
        released.append(tensor.name)
        file.release(tensor)

    with open_weights(tmp_path) as file:
        weights = find_weights(describe_file(file)[1], file)
        predicted = shape_weights(weights, "none")
        prepared = Loader(device, torch.bfloat16, release=release).load(weights)
        sources: set[str] = set()
        for layer, shape, found in zip(
            weights.layers, predicted.layers, prepared.layers, strict=True
        ):
            for role in ("qkv", "attn_out", "gate_up", "down"):
                assert getattr(shape, role) == getattr(found, role).size, role
                assert getattr(shape, role).bytes == getattr(found, role).bytes, role
                for part in getattr(layer, role).parts:
                    assert isinstance(part, QuantizedTensor)
                    sources |= {source.name for source in part.sources}
    assert weight_bytes(predicted) == prepared_bytes(prepared)
    assert sources <= set(released)
    assert len(released) == len(set(released))


def in_fp8(weight: Weight, group: tuple[int, int]) -> Weight:
    """A weight of the same shape, its parts in FP8 with a scale for so many outputs and inputs."""

    def part(shape: tuple[int, int]) -> QuantizedTensor:
        spread = tuple(-(-size // by) for size, by in zip(shape, group, strict=True))
        matrix = QuantizedMatrix(
            kind=CodeKind.FP8,
            codes=RNG.integers(0, 120, shape, np.uint8),
            scales=RNG.random(spread, np.float32),
            zeros=None,
            permutation=None,
            group_rows=group[0],
            group_columns=group[1],
        )
        return QuantizedTensor(
            "w.weight", CodeKind.FP8, shape, (), *group, lambda: matrix, lambda: Beside(False, None)
        )

    return Weight(parts=tuple(part((p.shape[0], p.shape[1])) for p in weight.parts))


@pytest.mark.parametrize(
    ("mlp", "group", "gate_up"),
    [
        (256, (128, 128), MatrixFormat.FP8_BLOCK),
        (192, (128, 128), MatrixFormat.BF16),  # gate ends inside a block
        (256, (64, 64), MatrixFormat.BF16),
        (256, (1, 256), MatrixFormat.FP8),
    ],
)
def test_blocks_are_kept_where_parts_are_whole_blocks(
    device: torch.device, mlp: int, group: tuple[int, int], gate_up: MatrixFormat
) -> None:
    plain = tiny.make_weights(tiny.resized(tiny.SPECS["llama"], hidden=256, mlp=mlp))

    def change(role: str, weight: Weight) -> Weight:
        return in_fp8(weight, group) if role == "gate_up" else weight

    weights = plain.map(change)
    predicted = shape_weights(weights, "none").layers[0].gate_up
    found = Loader(device, torch.bfloat16).load(weights).layers[0].gate_up
    assert isinstance(found, Matrix)
    assert found.format is gate_up
    assert predicted == found.size
    assert predicted.bytes == found.bytes
    if gate_up is not MatrixFormat.BF16:
        expected = np.concatenate([dequantize(p) for p in weights.layers[0].gate_up.parts])
        assert np.array_equal(values_of(found), expected)


def logprobs(runner: Runner, steps: list[StepPlan]) -> list[float]:
    found: list[float] = []
    for plan in steps:
        runner.submit(plan)
        (result,) = rows_of(runner.collect())
        assert result.error is None
        found += result.target_logprobs
    return found


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq, 8 bits", "int8", "fp8, an output"])
def test_whole_models_answer_as_the_reference(
    tmp_path: Path, device: torch.device, kind: str
) -> None:
    """A chunk of several rows, then one row. Logprobs are down to -25 here; INT4 kernels multiply
    in half precision, eight-bit ones round activations to eight bits."""
    pack, config, _ = KINDS[kind]
    checkpoint(pack).save(tmp_path, config)
    tokens = [3, 17, 40, 5, 22, 9]
    steps = [
        plan_of(
            *[
                Row(
                    sequence_id=0,
                    token_ids=tokens[first:end],
                    start=first,
                    block_table=[1],
                    targets=tokens[first + 1 : end + 1],
                )
            ]
        )
        for first, end in ((0, 4), (4, 5))
    ]
    with open_weights(tmp_path) as file:
        spec, refs = describe_file(file)
        weights = find_weights(refs, file)
        limits: dict[str, Any] = {"total_blocks": 2, "max_batch_tokens": 8, "max_sequences": 2}
        expected = logprobs(ReferenceRunner(spec, weights, **limits), steps)
        runner = CudaRunner(
            spec, weights, **limits, kv_dtype="f32", dtype=torch.float32, device=device
        )
        try:
            found = logprobs(runner, steps)
        finally:
            runner.close()
    atol = {"awq": 0.05, "gptq": 0.05, "gptq, 8 bits": 2e-3}.get(kind, 0.3)
    np.testing.assert_allclose(found, expected, atol=atol, rtol=0)


def test_random_weights_are_made_on_the_device(tmp_path: Path, device: torch.device) -> None:
    checkpoint(lambda o, i: pack_awq(RNG, o, i, 32)).save(tmp_path, AWQ)
    config = {k: v for k, v in DummyFolder.open(tmp_path).config.items() if "quant" not in k}
    file = DummyFolder(tmp_path, config)
    weights = find_weights(describe_file(file)[1], file)
    prepared = Loader(device, torch.bfloat16).load(weights)
    down = prepared.layers[1].down
    assert isinstance(down, Matrix)
    assert down.data.device.type == device.type
    assert down.data.dtype == torch.bfloat16
    assert 0.018 < down.data.float().std().item() < 0.022
    other = prepared.layers[0].down
    assert isinstance(other, Matrix)
    assert not torch.equal(down.data, other.data)
    norm = prepared.final_norm
    assert isinstance(norm, torch.Tensor)
    assert norm.tolist() == [1.0] * 64
