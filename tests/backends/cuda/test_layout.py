"""What is predicted of the CUDA backend's memory is what its runner allocates."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.backends.cuda import layout
from headrace.backends.cuda.backend import CudaBackend
from headrace.backends.cuda.device import Gpu
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.kv_sizes import kv_bytes_per_token
from headrace.backends.cuda.products.formats import MatrixFormat, MatrixSize
from headrace.backends.cuda.runner import CudaRunner, multiprocessors_of
from headrace.core.config import EngineConfig, GraphMode
from headrace.core.errors import ConfigError
from headrace.core.sizes import GIB

_FOUND = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
assert _FOUND is not None
assert _FOUND.loader is not None
tiny: Any = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(tiny)


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8"])
@pytest.mark.parametrize("name", ["llama", "gemma", "qwen2", "smollm3", "olmo2"])
def test_predicted_is_allocated(name: str, quantization: str, device: torch.device) -> None:
    spec = tiny.SPECS[name]
    weights = tiny.make_weights(spec, format_name="BF16")
    config = EngineConfig(max_batch_tokens=48, max_sequences=6, block_tokens=16)
    sizes = config.sizes(CudaBackend.defaults)
    shapes = layout.shape_weights(weights, quantization)
    runner = CudaRunner(
        spec,
        weights,
        total_blocks=9,
        block_tokens=16,
        max_batch_tokens=48,
        max_sequences=6,
        context_tokens=80,
        quantization=quantization,
        device=device,
    )
    assert layout.weight_bytes(shapes) == runner.weight_bytes
    assert runner.kv_bytes == 9 * 16 * kv_bytes_per_token(spec, "bf16")
    found = layout.activation_bytes(spec, shapes, sizes, multiprocessors_of(device), 48, 80)
    assert found == runner.activation_bytes
    runner.close()


def shaped(weight: object) -> tuple[MatrixFormat, int]:
    assert isinstance(weight, MatrixSize)
    return weight.format, weight.group


def test_small_matrices_become_fp8_in_small_groups() -> None:
    """But for the last one; matrices past the bound have a scale an output, all of them."""
    spec = tiny.SPECS["llama"]
    small = layout.shape_weights(tiny.make_weights(spec), "fp8").layers
    for weight in (small[0].qkv, small[0].attn_out, small[0].down, small[-1].gate_up):
        assert shaped(weight) == (MatrixFormat.FP8_BLOCK, 32)
    assert shaped(small[-1].down) == (MatrixFormat.BF16, 0)
    int8 = layout.shape_weights(tiny.make_weights(spec), "int8").layers
    assert shaped(int8[-1].down) == (MatrixFormat.INT8, 0)
    wide = tiny.resized(spec, hidden=1024, mlp=2112)
    large = layout.shape_weights(tiny.make_weights(wide), "fp8").layers
    assert shaped(large[-1].gate_up) == shaped(large[-1].down) == (MatrixFormat.FP8, 0)


def test_int4_layers_are_a_quarter() -> None:
    spec = tiny.SPECS["llama"]
    wide = tiny.make_weights(tiny.resized(spec, hidden=128, mlp=256))
    whole = layout.weight_bytes(layout.shape_weights(wide, "none"))
    small = layout.weight_bytes(layout.shape_weights(wide, "int4"))
    table = 2 * spec.vocab_size * 128 * 2
    assert (small - table) / (whole - table) == pytest.approx(0.27, abs=0.02)


def test_graphs_are_counted_unless_there_are_none() -> None:
    spec = tiny.SPECS["llama"]
    assert layout.graph_bytes(spec, GraphMode.START, 8192) > 0
    assert layout.graph_bytes(spec, GraphMode.OFF, 8192) == 0


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"block_tokens": 8}, "block_tokens is 8"),
        ({"block_tokens": 24}, "block_tokens is 24"),
        ({"kv_dtype": "int8"}, "kv_dtype is 'int8'; the CUDA backend supports bf16, f16, fp8"),
    ],
)
def test_what_it_does_not_have_is_refused(settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        layout.check_sizes(EngineConfig(**settings).sizes(CudaBackend.defaults))


def test_fp8_is_refused_where_a_gpu_has_none() -> None:
    old = Gpu(
        index=0,
        name="NVIDIA A100",
        capability=(8, 0),
        multiprocessors=108,
        total_bytes=40 * GIB,
        free_bytes=39 * GIB,
    )
    weights = tiny.make_weights(tiny.SPECS["llama"])
    plain, fp8 = (layout.shape_weights(weights, q) for q in ("none", "fp8"))
    layout.check_fp8(old, plain, "bf16")
    layout.check_fp8(old, layout.shape_weights(weights, "int8"), "f16")
    with pytest.raises(ConfigError, match=r"A100 has compute capability 8\.0; FP8 needs 8\.9"):
        layout.check_fp8(old, plain, "fp8")
    with pytest.raises(ConfigError, match="the layers would be FP8") as caught:
        layout.check_fp8(old, fp8, "bf16")
    assert caught.value.param == "quantization"
    layout.check_fp8(replace(old, capability=(8, 9)), fp8, "fp8")


def test_blocks_are_copied_one_after_the_other(device: torch.device) -> None:
    pool = KvPool(tiny.SPECS["llama"], 4, 16, "fp8", device)
    for number in range(4):
        pool.layers[1].view(torch.uint8)[:, number] = number + 1
    pool.copy([(0, 1), (1, 3)])
    found = pool.layers[1].view(torch.uint8)[:, :, 0, 0, 0].tolist()
    assert found == [[1, 1, 3, 1]] * 2
