"""Eight-bit checkpoints: float8 and int8, scales of every kind, against torch's own conversions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.weights.packers import Checkpoint, check_all, checkpoint, load, pack_eight_bit

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.weights.dequantize import dequantize
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import E4M3, QuantizedTensor

FP8: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DOWN = "model.layers.1.mlp.down_proj"


def compressed(kind: str = "float", strategy: str = "channel", **weights: Any) -> dict[str, object]:
    args = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": args,
                "input_activations": {"num_bits": 8, "dynamic": True, "strategy": "token"},
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def test_every_float8_is_what_torch_says() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    expected = bits.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3, expected, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3), np.signbit(expected))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), "out", "out, 1"])
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_a_tensor_and_an_output(
    tmp_path: Path, shape: object, scale: str, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(1)

    def pack(outputs: int, inputs: int) -> Any:
        found: tuple[int, ...] = shape if isinstance(shape, tuple) else (outputs, 1)
        found = (outputs,) if shape == "out" else found
        return pack_eight_bit(rng, outputs, inputs, scale=scale, shape=found, scale_dtype=dtype)

    made = checkpoint(pack)
    made.save(tmp_path, FP8)
    assert len(check_all(tmp_path, made.truth)) == 14


@pytest.mark.parametrize("block", [(32, 32), (16, 24), (128, 128), (33, 7)])
@pytest.mark.parametrize("config", ["fp8", "compressed"])
def test_scales_a_block(tmp_path: Path, block: tuple[int, int], config: str) -> None:
    """Also where blocks are larger than the matrix or stick out of it."""
    rng = np.random.default_rng(2)

    def pack(outputs: int, inputs: int) -> Any:
        shape = (-(-outputs // block[0]), -(-inputs // block[1]))
        scale = "weight_scale_inv" if config == "fp8" else "weight_scale"
        return pack_eight_bit(rng, outputs, inputs, scale=scale, shape=shape, block=block)

    made = checkpoint(pack)
    made.save(
        tmp_path,
        {**FP8, "weight_block_size": list(block)}
        if config == "fp8"
        else compressed("float", "block", block_structure=list(block)),
    )
    assert len(check_all(tmp_path, made.truth)) == 14


@pytest.mark.parametrize("zero_point", [False, True])
def test_int8_with_a_scale_an_output(tmp_path: Path, zero_point: bool) -> None:
    rng = np.random.default_rng(3)

    def pack(outputs: int, inputs: int) -> Any:
        shape = (outputs, 1)
        return pack_eight_bit(
            rng, outputs, inputs, dtype="int8", shape=shape, zero_point=zero_point
        )

    made = checkpoint(pack)
    made.save(tmp_path, compressed("int", symmetric=not zero_point))
    assert len(check_all(tmp_path, made.truth)) == 14
    with open_weights(tmp_path) as file:
        part = find_weights(describe_file(file)[1], file).layers[1].down.parts[0]
        assert isinstance(part, QuantizedTensor)
        matrix = part.unpack()
        assert matrix.codes.dtype == np.int8
        assert (matrix.group_rows, matrix.group_columns) == (1, 96)
        assert matrix.scales.shape == (64, 1)
        assert (matrix.zeros is not None) == zero_point


def test_int8_in_groups(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)

    def pack(outputs: int, inputs: int) -> Any:
        return pack_eight_bit(
            rng, outputs, inputs, dtype="int8", shape=(outputs, inputs // 16), block=(1, 16)
        )

    made = checkpoint(pack)
    made.save(tmp_path, compressed("int", "group", group_size=16))
    check_all(tmp_path, made.truth)


def test_scales_of_activations_and_keys_are_left_alone(tmp_path: Path) -> None:
    made = checkpoint(partial(pack_eight_bit, np.random.default_rng(5)), keep=("down_proj",))
    for name in ("mlp.up_proj.input_scale", "self_attn.k_scale", "self_attn.v_proj.v_scale"):
        made.tensors[f"model.layers.0.{name}"] = torch.tensor(0.5)
    made.save(tmp_path, {**FP8, "activation_scheme": "static", "ignored_layers": ["down_proj"]})
    assert len(check_all(tmp_path, made.truth)) == 12


def test_transformers_agrees_about_blocks(tmp_path: Path) -> None:
    """Its own dequantization of the same tensors, beside ours."""
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    rng = np.random.default_rng(6)

    def pack(outputs: int, inputs: int) -> Any:
        shape = (outputs // 16, inputs // 16)
        return pack_eight_bit(
            rng, outputs, inputs, scale="weight_scale_inv", shape=shape, block=(16, 16)
        )

    made = checkpoint(pack)
    made.save(tmp_path, {**FP8, "weight_block_size": [16, 16]})
    inputs = {name: [made.tensors[f"{DOWN}.{name}"]] for name in ("weight", "weight_scale_inv")}
    (theirs,) = module.Fp8Dequantize(None).convert(inputs).values()
    with open_weights(tmp_path) as file:
        part = find_weights(describe_file(file)[1], file).layers[1].down.parts[0]
        assert isinstance(part, QuantizedTensor)
        assert np.array_equal(dequantize(part), theirs.numpy())


@pytest.fixture
def made() -> Checkpoint:
    rng = np.random.default_rng(7)
    return checkpoint(lambda o, i: pack_eight_bit(rng, o, i, shape=(o, 1)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight", lambda t: t[:-1], r"shape: found \[63, 96\]; expected \[64, 96\]"),
        ("weight_scale", lambda t: t[:-1], r"shape: found \[63, 1\]; expected"),
        ("weight_scale", lambda t: t.T.contiguous(), r"shape: found \[1, 64\]; expected"),
        ("weight_scale", lambda t: t.to(torch.int8), "type: found I8; expected F32 or BF16"),
        ("weight_scale", lambda t: None, "missing, or of an unsupported type"),
    ],
)
def test_damaged_modules_are_named(
    tmp_path: Path, made: Checkpoint, name: str, change: object, message: str
) -> None:
    assert callable(change)
    changed = change(made.tensors.pop(f"{DOWN}.{name}"))
    if changed is not None:
        made.tensors[f"{DOWN}.{name}"] = changed.contiguous()
    made.save(tmp_path, FP8)
    with pytest.raises(WeightsError, match=message) as caught:
        load(tmp_path)
    assert f"'{DOWN}.{name}' (down)" in caught.value.cause


def test_codes_of_another_kind_are_refused(tmp_path: Path, made: Checkpoint) -> None:
    weight = made.tensors[f"{DOWN}.weight"].float()
    made.tensors[f"{DOWN}.weight"] = weight.to(torch.float8_e5m2)
    made.save(tmp_path, FP8)
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.weight' \(down\): type 'F8_E5M2'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
        ({**compressed(), "format": "pack-quantized"}, "format is 'pack-quantized'; supported"),
        (compressed(num_bits=4), r"weights\.num_bits is 4; supported: 8"),
        (compressed("float", "tensor_group"), "strategy is 'tensor_group'"),
        ({**compressed(), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        ({**compressed(), "transform_config": {"config_groups": {"u": 1}}}, "transform_config is"),
    ],
)
def test_what_is_not_done_is_said(
    tmp_path: Path, made: Checkpoint, config: dict[str, object], message: str
) -> None:
    made.save(tmp_path, config)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FP8, "weight_block_size": [128]}, "weight_block_size is"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size is"),
        ({**FP8, "weight_block_size": "128"}, "weight_block_size is"),
        ({**FP8, "weight_block_size": [True, 1.5]}, "weight_block_size is"),
        ({**compressed(), "config_groups": {}}, "config_groups is"),
        ({**compressed(), "config_groups": {"group_0": {"weights": None}}}, "config_groups.group_"),
        ({**compressed(), "config_groups": {"group_0": 3}}, "config_groups.group_0 is 3"),
        ({"bits": 4}, "quant_method is missing"),
        ({"quant_method": ["fp8"]}, "quant_method is"),
    ],
)
def test_configs_that_cant_be(
    tmp_path: Path, made: Checkpoint, config: dict[str, object], message: str
) -> None:
    made.save(tmp_path, config)
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)
