"""Bytes predicted from formats and shapes, against what the native module says it took."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.backends.cpu import _native
from headrace.backends.cpu.backend import CpuBackend
from headrace.backends.cpu.layout import matrix_bytes, packed_bytes
from headrace.core.config import EngineConfig
from headrace.core.errors import ConfigError, UnsupportedModelError
from headrace.weights.tensor import FORMATS, Tensor

RandomTensor = Callable[..., Tensor]


def native_bytes(*parts: Tensor, bias: bool = False) -> int:
    tables = []
    for part in parts:
        rows, columns = part.shape
        data = np.frombuffer(part.data, np.uint8)
        tables.append(_native.Table(part.format.name, rows, columns, data))
    values = np.zeros(sum(part.shape[0] for part in parts), np.float32) if bias else None
    return _native.Matrix(tables, values, 1).bytes


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_odd_shapes(name: str, random_tensor: RandomTensor) -> None:
    rng = np.random.default_rng(0)
    step = FORMATS[name].block_values
    for rows in (1, 15, 16, 17, 33, 160):
        for columns in (step, 3 * step, 256):
            if columns % step == 0:
                tensor = random_tensor(rng, name, rows, columns)
                assert packed_bytes(name, rows, columns) == native_bytes(tensor)


def test_a_figure_worked_out_by_hand() -> None:
    """Q4_1, 16 outputs and 64 inputs: half a byte each, and 2 groups' scales and minimums, fp16."""
    assert packed_bytes("Q4_1", 16, 64) == 16 * 64 // 2 + 2 * 16 * 2 * 2
    assert packed_bytes("Q4_1", 17, 65) == 4 * packed_bytes("Q4_1", 16, 64)  # padded both ways
    assert packed_bytes("BF16", 17, 65) == 32 * 65 * 2


@pytest.mark.parametrize(
    "parts",
    [
        [("Q8_0", 16), ("Q8_0", 32), ("Q8_0", 5)],
        [("Q8_0", 5), ("Q8_0", 5), ("Q8_0", 6)],  # would straddle: three matrices, each padded
        [("Q8_0", 5), ("Q8_0", 11), ("Q4_1", 16)],
        [("Q4_K", 48), ("Q6_K", 24), ("Q6_K", 24)],
        [("F16", 20), ("F32", 20)],
    ],
)
def test_stacked_parts(parts: list[tuple[str, int]], random_tensor: RandomTensor) -> None:
    rng = np.random.default_rng(0)
    tensors = [random_tensor(rng, name, rows, 256) for name, rows in parts]
    assert matrix_bytes(tensors) == native_bytes(*tensors)
    biases = sum(rows for _, rows in parts)
    assert native_bytes(*tensors, bias=True) == matrix_bytes(tensors) + 4 * biases


def test_what_the_backend_does_not_have_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'IQ2_XS'; the CPU backend supports F32, "):
        packed_bytes("IQ2_XS", 16, 256)
    with pytest.raises(
        ConfigError, match=r"block_tokens is 32; the CPU backend supports only 16"
    ) as error:
        CpuBackend().check(EngineConfig(block_tokens=32))
    assert error.value.param == "block_tokens"
    with pytest.raises(
        ConfigError, match=r"kv_dtype is 'fp8'; the CPU backend supports f32, f16"
    ) as e:
        CpuBackend().check(EngineConfig.from_mapping({"kv_dtype": "fp8"}))
    assert e.value.param == "kv_dtype"
