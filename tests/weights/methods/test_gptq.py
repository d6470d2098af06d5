"""GPTQ checkpoints: bits, groups, act-order, both ways to store zero points; bad ones refused."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.weights.packers import Checkpoint, check_all, checkpoint, load, pack_gptq

from headrace.core.errors import HeadraceError, UnsupportedModelError, WeightsError
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import QuantizedMatrix, QuantizedTensor

GPTQ: dict[str, object] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False,
    "checkpoint_format": "gptq", "lm_head": False, "meta": {"quantizer": ["x:1"]},
    "dynamic": {r"-:.*lm_head.*": {}},
}  # fmt: skip
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def made() -> Checkpoint:
    return checkpoint(partial(pack_gptq, np.random.default_rng(1), group=32, act_order=True))


def matrix_of(folder: Path) -> QuantizedMatrix:
    with open_weights(folder) as file:
        part = find_weights(describe_file(file)[1], file).layers[1].down.parts[0]
        assert isinstance(part, QuantizedTensor)
        return part.unpack()


@pytest.mark.parametrize(
    ("bits", "act_order", "symmetric", "less_one"),
    list(itertools.product([4, 8], [False, True], [False, True], [False, True])),
)
def test_values_are_exact(
    tmp_path: Path, bits: int, act_order: bool, symmetric: bool, less_one: bool
) -> None:
    rng = np.random.default_rng(bits)
    pack = partial(
        pack_gptq, rng, group=16, bits=bits, act_order=act_order, symmetric=symmetric,
        less_one=less_one,
    )  # fmt: skip
    made = checkpoint(pack)
    config = GPTQ | {"bits": bits, "group_size": 16, "desc_act": act_order, "sym": symmetric}
    made.save(tmp_path, config | {"checkpoint_format": "gptq" if less_one else "gptq_v2"})
    assert len(check_all(tmp_path, made.truth)) == 14
    matrix = matrix_of(tmp_path)
    assert (matrix.zeros is None) == symmetric
    assert (matrix.permutation is not None) == act_order
    assert matrix.codes.dtype == (np.uint8 if bits == 4 else np.int8)
    assert matrix.scales.shape == (64, 6)


def test_the_permutation_puts_groups_side_by_side(tmp_path: Path, made: Checkpoint) -> None:
    made.save(tmp_path, GPTQ)
    matrix = matrix_of(tmp_path)
    assert matrix.permutation is not None
    assert sorted(matrix.permutation) == list(range(96))
    owners = made.tensors[f"{DOWN}.g_idx"].numpy()[matrix.permutation]
    assert np.array_equal(owners, np.arange(96) // 32)
    # A product as a kernel would do it: gathered inputs, contiguous groups.
    x = np.random.default_rng(0).standard_normal((3, 96))
    assert matrix.zeros is not None
    codes = (matrix.codes.astype(float) - matrix.zeros.repeat(32, 1)) * matrix.scales.repeat(32, 1)
    expected = x @ made.truth[f"{DOWN}.weight"].T.astype(float)
    assert np.allclose(x[:, matrix.permutation] @ codes.T, expected, atol=1e-6)


def test_one_group_for_all_inputs_and_no_order_in_the_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    made = checkpoint(lambda o, i: pack_gptq(rng, o, i, i))
    made.save(tmp_path, GPTQ | {"group_size": -1, "desc_act": False})
    check_all(tmp_path, made.truth)
    made.tensors = {k: v for k, v in made.tensors.items() if not k.endswith("g_idx")}
    made.save(tmp_path, GPTQ | {"group_size": -1, "desc_act": False})
    check_all(tmp_path, made.truth)
    made.save(tmp_path, GPTQ | {"group_size": -1, "desc_act": True})
    with pytest.raises(WeightsError, match=r"q_proj\.g_idx' \(qkv\): missing"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("at", "value", "error", "message"),
    [
        (0, -1, WeightsError, "group of an input: found -1; expected 0 to 2"),
        (95, 3, WeightsError, "group of an input: found 3; expected 0 to 2"),
        (7, 2**31 - 1, WeightsError, f"found {2**31 - 1}; expected 0 to 2"),
        (None, 0, UnsupportedModelError, "group 0 has 96 inputs; expected 32 in each"),
    ],
)
def test_orders_that_cant_be(
    tmp_path: Path,
    made: Checkpoint,
    at: int | None,
    value: int,
    error: type[HeadraceError],
    message: str,
) -> None:
    order = made.tensors[f"{DOWN}.g_idx"]
    order[slice(None) if at is None else at] = value
    made.save(tmp_path, GPTQ)
    with pytest.raises(error, match=message) as caught:
        load(tmp_path)
    assert f"{DOWN}.g_idx" in caught.value.cause
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t[:-1], r"found \[11, 64\]; expected \[12, 64\]"),
        ("qzeros", lambda t: t[:, :-1], r"found \[3, 7\]; expected \[3, 8\]"),
        ("scales", lambda t: t[:2], r"found \[2, 64\]; expected \[3, 64\]"),
        ("g_idx", lambda t: t[:-1], r"found \[95\]; expected \[96\]"),
        ("g_idx", lambda t: t.to(torch.int8), "type: found I8; expected I32"),
        ("g_idx", lambda t: t.float(), "type: found F32; expected I32"),
        ("scales", lambda t: None, "missing, or of an unsupported type"),
    ],
)
def test_damaged_modules_are_named(
    tmp_path: Path, made: Checkpoint, name: str, change: object, message: str
) -> None:
    assert callable(change)
    changed = change(made.tensors.pop(f"{DOWN}.{name}"))
    if changed is not None:
        made.tensors[f"{DOWN}.{name}"] = changed.contiguous()
    made.save(tmp_path, GPTQ)
    with pytest.raises(WeightsError, match=message) as caught:
        load(tmp_path)
    assert f"'{DOWN}.{name}' (down)" in caught.value.cause


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, "bits is 2; supported: 4 and 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq and"),
        ({"is_marlin_format": True}, "is_marlin_format is True"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'; supported: int32"),
        ({"dynamic": {r"+:.*down.*": {"bits": 8}}}, "dynamic is .*; supported: rules that leave"),
    ],
)
def test_what_is_not_done_is_said(
    tmp_path: Path, made: Checkpoint, change: dict[str, object], message: str
) -> None:
    made.save(tmp_path, GPTQ | change)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def test_the_wrong_bits_are_seen_in_the_shapes(tmp_path: Path, made: Checkpoint) -> None:
    made.save(tmp_path, GPTQ | {"bits": 8})
    with pytest.raises(WeightsError, match=r"qweight.*shape: found"):
        load(tmp_path)
