"""AWQ checkpoints: every code, zero point and scale where the format says; bad ones refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.weights.packers import CONFIG, Checkpoint, check_all, checkpoint, load, pack_awq

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.weights.describe import describe_file
from headrace.weights.load import find_weights, open_weights
from headrace.weights.methods.quantized import CodeKind, QuantizedTensor
from headrace.weights.tensor import Tensor

AWQ: dict[str, object] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def made() -> Checkpoint:
    return checkpoint(partial(pack_awq, np.random.default_rng(1), group=32))


@pytest.mark.parametrize("group", [16, 32, -1])
def test_values_are_exact(tmp_path: Path, group: int) -> None:
    rng = np.random.default_rng(2)
    made = checkpoint(lambda o, i: pack_awq(rng, o, i, i if group == -1 else group))
    made.save(tmp_path, {**AWQ, "group_size": group})
    assert len(check_all(tmp_path, made.truth)) == 14  # seven matrices in each of two layers


def test_what_a_backend_gets(tmp_path: Path, made: Checkpoint) -> None:
    made.save(tmp_path, AWQ)
    with open_weights(tmp_path) as file:
        weights = find_weights(describe_file(file)[1], file)
        part = weights.layers[1].down.parts[0]
        assert isinstance(part, QuantizedTensor)
        assert (part.name, part.kind, part.shape) == (f"{DOWN}.weight", CodeKind.INT4, (64, 96))
        assert [s.name.rpartition(".")[2] for s in part.sources] == ["qweight", "qzeros", "scales"]
        matrix = part.unpack()
        assert matrix.codes.shape == (64, 96)
        assert matrix.codes.dtype == np.uint8
        assert matrix.codes.max() < 16
        assert matrix.scales.shape == (64, 3)
        assert matrix.zeros is not None
        assert matrix.zeros.shape == (64, 3)
        assert matrix.permutation is None
        assert weights.embed is not None
        assert isinstance(weights.embed.parts[0], Tensor)
        for source in part.sources:  # can be let go of and read again
            file.release(source)
        assert np.array_equal(part.unpack().codes, matrix.codes)


def test_modules_that_were_left_out_stay_float(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    made = checkpoint(partial(pack_awq, rng, group=32), keep=("down_proj", "layers.0.self_attn"))
    made.save(tmp_path, {**AWQ, "modules_to_not_convert": ["down_proj", "layers.0.self_attn"]})
    quantized = check_all(tmp_path, made.truth)
    assert len(quantized) == 14 - 2 - 4
    assert not any("down_proj" in name for name in quantized)


def test_biases_of_zeros_are_nothing_and_others_are_refused(
    tmp_path: Path, made: Checkpoint
) -> None:
    made.tensors[f"{DOWN}.bias"] = torch.zeros(64, dtype=torch.float16)
    made.save(tmp_path, AWQ)
    check_all(tmp_path, made.truth)
    made.tensors[f"{DOWN}.bias"] = torch.ones(64, dtype=torch.float16)
    made.save(tmp_path, AWQ)
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t[:-1], r"shape: found \[95, 8\]; expected \[96, 8\]"),
        ("qweight", lambda t: t.T.contiguous(), r"shape: found \[8, 96\]"),
        ("qzeros", lambda t: t[:-1], r"shape: found \[2, 8\]; expected \[3, 8\]"),
        ("scales", lambda t: t[:, :-8], r"shape: found \[3, 56\]; expected \[3, 64\]"),
        ("qzeros", lambda t: t.float(), "type: found F32; expected I32"),
        ("scales", lambda t: t.to(torch.int32), "type: found I32; expected F16 or BF16 or F32"),
        ("qzeros", lambda t: None, "missing, or of an unsupported type; expected I32"),
        ("qzeros", lambda t: t.long(), "missing, or of an unsupported type; expected I32"),
    ],
)
def test_damaged_modules_are_named(
    tmp_path: Path, made: Checkpoint, name: str, change: object, message: str
) -> None:
    assert callable(change)
    full = f"{DOWN}.{name}"
    changed = change(made.tensors.pop(full))
    if changed is not None:
        made.tensors[full] = changed.contiguous()
    made.save(tmp_path, AWQ)
    with pytest.raises(WeightsError, match=message) as caught:
        load(tmp_path)
    assert f"'{full}' (down)" in caught.value.cause
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "quantization_config.bits is 3; supported: 4"),
        ({"version": "gemv"}, "quantization_config.version is 'gemv'; supported: gemm"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq'; supported: awq, gptq, fp8"),
        ({"group_size": 40}, "inputs, in groups: found 64; expected a multiple of 40"),
    ],
)
def test_what_is_not_done_is_said(
    tmp_path: Path, made: Checkpoint, change: dict[str, object], message: str
) -> None:
    made.save(tmp_path, AWQ | change)
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("size", [0, -2, 1 << 30, "128", None, 3.5, True])
def test_group_sizes_that_cant_be(tmp_path: Path, made: Checkpoint, size: object) -> None:
    made.save(tmp_path, AWQ | {"group_size": size})
    with pytest.raises(WeightsError, match=r"quantization_config\.group_size is"):
        load(tmp_path)


def test_a_quantized_output_layer_is_read_and_a_quantized_embedding_refused(
    tmp_path: Path, made: Checkpoint
) -> None:
    rng = np.random.default_rng(5)
    vocab, hidden = CONFIG["vocab_size"], CONFIG["hidden_size"]
    assert isinstance(vocab, int)
    assert isinstance(hidden, int)
    for module in ("lm_head", "model.embed_tokens"):
        del made.tensors[f"{module}.weight"]
        packed = pack_awq(rng, vocab, hidden, 32)
        made.tensors.update({f"{module}.{k}": v for k, v in packed.tensors.items()})
        made.truth[f"{module}.weight"] = packed.truth
        made.save(tmp_path, AWQ)
        if module == "lm_head":
            assert "lm_head.weight" in check_all(tmp_path, made.truth)
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight' \(embed\): type INT4"):
        load(tmp_path)
