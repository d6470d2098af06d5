"""Every format's values, against the gguf package's own dequantizers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.weights import dequantize as module
from headrace.weights.dequantize import dequantize, dequantize_rows
from headrace.weights.tensor import FORMATS, Tensor

# Where a block's float16 scales lie: random bytes there would give NaNs, which hide differences.
SCALES_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
WRITABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def _random(name: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Blocks of random bits with finite scales: every bit of every block matters."""
    rng = np.random.default_rng(seed)
    format = FORMATS[name]
    count = int(np.prod(shape)) // format.block_values
    if format.block_values == 1:
        values = rng.standard_normal(count).astype(np.float32)
        blocks = values.view(np.uint8).reshape(count, 4)[:, 4 - format.block_bytes :]
        if name == "F16":
            blocks = values.astype(np.float16).view(np.uint8)
    else:
        blocks = rng.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
        for at in SCALES_AT[name]:
            scale = rng.standard_normal((count, 1)).astype("<f2")
            blocks[:, at : at + 2] = scale.view(np.uint8)
    return Tensor("w", format, shape, memoryview(blocks.tobytes()))


def _theirs(tensor: Tensor) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType[tensor.format.name]
    raw = np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape[:-1], -1)
    if tensor.format.name in ("F32", "F16"):
        raw = raw.view("<f4" if tensor.format.name == "F32" else "<f2")
    values: NDArray[np.float32] = gguf.dequantize(raw, kind)
    return values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(256,), (5, 512), (2, 3, 256)])
def test_random_blocks_match_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    tensor = _random(name, shape)
    values = dequantize(tensor)
    assert values.dtype == np.float32
    assert values.shape == shape
    assert np.isfinite(values).all()
    assert np.array_equal(values, _theirs(tensor))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_those_of_the_whole(name: str) -> None:
    tensor = _random(name, (7, 512), seed=1)
    whole = dequantize(tensor)
    assert np.array_equal(dequantize_rows(tensor, [6, 0, 6, 3]), whole[[6, 0, 6, 3]])
    assert np.array_equal(dequantize_rows(tensor, np.array([2])), whole[[2]])
    assert dequantize_rows(tensor, []).shape == (0, 512)


@pytest.mark.parametrize("name", WRITABLE)
def test_quantized_values_come_back_near(name: str) -> None:
    rng = np.random.default_rng(2)
    values = rng.standard_normal((4, 256)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[name])
    tensor = Tensor("w", FORMATS[name], values.shape, memoryview(raw.tobytes()))
    error = np.sqrt(np.mean((dequantize(tensor) - values) ** 2))
    # Uniform steps over about +-3: the more bits, the smaller; floats hold all of it or nearly.
    bits = 16 if FORMATS[name].block_values == 1 else int(name[1])
    assert error < (0.01 if bits == 16 else 3.0 / 2**bits)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F16"])
def test_pieces_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = _random(name, (9, 512), seed=4)
    whole = dequantize(tensor)
    monkeypatch.setattr(module, "_PIECE_VALUES", 512)
    assert np.array_equal(dequantize(tensor), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_any_bytes_give_the_same_including_nan(name: str) -> None:
    """Scales of any bits: infinities and NaNs appear where the oracle has them, silently."""
    rng = np.random.default_rng(5)
    raw = rng.bytes(64 * FORMATS[name].block_bytes)
    tensor = Tensor("w", FORMATS[name], (64 * FORMATS[name].block_values,), memoryview(raw))
    values = dequantize(tensor)
    with np.errstate(all="ignore"):
        assert np.array_equal(values, _theirs(tensor), equal_nan=True)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0"])
def test_unaligned_bytes(name: str) -> None:
    """Safetensors data may begin anywhere."""
    tensor = _random(name, (2, 64), seed=6)
    shifted = memoryview(b"x" + bytes(tensor.data))[1:]
    moved = Tensor("w", tensor.format, tensor.shape, shifted)
    assert np.array_equal(dequantize(moved), dequantize(tensor))
