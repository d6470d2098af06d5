"""What is at a path is opened as what it is; a missing name or wrong shape is told clearly."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.core.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from headrace.models.decoder import DecoderWeights, LayerWeights
from headrace.models.refs import TensorRef, WeightRef
from headrace.weights.dequantize import dequantize
from headrace.weights.files.gguf import GgufFile
from headrace.weights.files.safetensors import SafetensorsFolder
from headrace.weights.load import find_weights, open_weights


def _ref(name: str, *shape: int) -> WeightRef:
    return WeightRef(parts=(TensorRef(name, shape),))


def _refs() -> DecoderWeights[WeightRef]:
    """One layer of hidden 4, two heads of 2, intermediate 6, vocabulary 5, tied."""
    qkv = [TensorRef(f"l.0.{x}_proj.weight", (4, 4)) for x in "qkv"]
    layer = LayerWeights(
        attn_norm=_ref("l.0.input_norm.weight", 4),
        qkv=WeightRef(
            parts=tuple(qkv), bias=tuple(TensorRef(f"l.0.{x}_proj.bias", (4,)) for x in "qkv")
        ),
        attn_out=_ref("l.0.o_proj.weight", 4, 4),
        mlp_norm=WeightRef(parts=(TensorRef("l.0.post_norm.weight", (4,)),), offset=1.0),
        gate_up=WeightRef(
            parts=(TensorRef("l.0.gate.weight", (6, 4)), TensorRef("l.0.up.weight", (6, 4)))
        ),
        down=_ref("l.0.down.weight", 4, 6),
    )
    return DecoderWeights(
        embed=_ref("embed.weight", 5, 4),
        layers=[layer],
        final_norm=_ref("norm.weight", 4),
        head=_ref("embed.weight", 5, 4),
    )


def _tensors() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def make(role: str, ref: WeightRef) -> None:
        for part in (*ref.parts, *ref.bias):
            found[part.name] = torch.randn(part.shape)

    _refs().map(make)
    return found


def _save(folder: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsFolder:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return SafetensorsFolder.open(folder)


def test_every_weight_is_found(tmp_path: Path) -> None:
    tensors = _tensors()
    with _save(tmp_path, tensors) as folder:
        weights = find_weights(_refs(), folder)
        layer = weights.layers[0]
        assert (layer.qkv.rows, layer.qkv.columns) == (12, 4)
        assert [part.name for part in layer.qkv.parts] == [f"l.0.{x}_proj.weight" for x in "qkv"]
        assert [part.name for part in layer.qkv.bias] == [f"l.0.{x}_proj.bias" for x in "qkv"]
        assert layer.mlp_norm is not None
        assert layer.mlp_norm.offset == 1.0
        assert layer.q_norm is None
        assert np.array_equal(dequantize(layer.down.parts[0]), tensors["l.0.down.weight"].numpy())
        assert weights.head is weights.embed  # tied: to be packed once


@pytest.mark.parametrize(
    ("gone", "role"), [("l.0.k_proj.weight", "qkv"), ("l.0.v_proj.bias", "qkv bias")]
)
def test_a_missing_tensor_is_named_with_near_names(tmp_path: Path, gone: str, role: str) -> None:
    tensors = _tensors()
    del tensors[gone]
    with (
        _save(tmp_path, tensors) as folder,
        pytest.raises(WeightsError, match=f"no tensor '{gone}' \\({role}") as caught,
    ):
        find_weights(_refs(), folder)
    assert gone.replace("_proj", "").split(".")[-1] in caught.value.cause
    assert "'l.0.q_proj." in caught.value.cause  # a near name
    assert str(tmp_path) in caught.value.cause
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["l.0.gate.weight", "l.0.q_proj.bias", "norm.weight"])
def test_a_wrong_shape_shows_both(tmp_path: Path, name: str) -> None:
    tensors = _tensors()
    expected = list(tensors[name].shape)
    tensors[name] = torch.zeros(3, 8)
    with (
        _save(tmp_path, tensors) as folder,
        pytest.raises(WeightsError, match=f"'{name}'") as caught,
    ):
        find_weights(_refs(), folder)
    assert f"found [3, 8]; expected {expected}" in caught.value.cause


def test_a_dtype_that_is_not_read_is_said_when_asked_for(tmp_path: Path) -> None:
    tensors = _tensors()
    tensors["l.0.down.weight"] = tensors["l.0.down.weight"].to(torch.float8_e4m3fn)
    tensors["rotary.ids"] = torch.arange(4)
    with (
        _save(tmp_path, tensors) as folder,
        pytest.raises(UnsupportedModelError, match=r"'l\.0\.down\.weight' \(down\)") as caught,
    ):
        find_weights(_refs(), folder)
    assert "type 'F8_E4M3'; supported are F32, F16, BF16" in caught.value.cause


def test_packed_integers_are_recognised(tmp_path: Path) -> None:
    """As AWQ and GPTQ have them: no weight, but a qweight."""
    tensors = _tensors()
    del tensors["l.0.o_proj.weight"]
    tensors["l.0.o_proj.qweight"] = torch.zeros(4, 1, dtype=torch.int32)
    with (
        _save(tmp_path, tensors) as folder,
        pytest.raises(UnsupportedModelError, match=r"o_proj\.qweight.*type 'I32'"),
    ):
        find_weights(_refs(), folder)


def test_gguf_is_told_by_content_or_suffix(tmp_path: Path, gguf_bytes: bytes) -> None:
    for name in ("m.gguf", "M.GGUF", "sha256-0123"):
        (tmp_path / name).write_bytes(gguf_bytes)
        with open_weights(tmp_path / name) as file:
            assert isinstance(file, GgufFile)
            assert file.path == tmp_path / name


def test_folders(model_folder: Path, gguf_bytes: bytes) -> None:
    with open_weights(model_folder) as file:
        assert isinstance(file, SafetensorsFolder)
    (model_folder / "m.gguf").write_bytes(gguf_bytes)
    with open_weights(model_folder) as file:
        assert isinstance(file, SafetensorsFolder)
    (model_folder / "model.safetensors").unlink()
    with open_weights(model_folder) as file:  # config.json may lie beside a GGUF
        assert isinstance(file, GgufFile)
    (model_folder / "n.gguf").write_bytes(gguf_bytes)
    with pytest.raises(WeightsError, match=r"2 GGUF files \(m\.gguf, n\.gguf\)"):
        open_weights(model_folder)


def test_a_folder_without_a_model(tmp_path: Path, safetensors_bytes: bytes) -> None:
    with pytest.raises(WeightsError, match=r"no config\.json"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes)
    with pytest.raises(WeightsError, match=r"no config\.json"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weights"):
        open_weights(tmp_path)


def test_wrong_files(tmp_path: Path, safetensors_bytes: bytes) -> None:
    with pytest.raises(ModelNotFoundError, match="No such file"):
        open_weights(tmp_path / "none")
    with pytest.raises(ModelNotFoundError, match="too long"):
        open_weights(tmp_path / ("tell me a story " * 100))
    with pytest.raises(ModelNotFoundError, match="null"):
        open_weights(tmp_path / "a\0b")
    (tmp_path / "m.safetensors").write_bytes(safetensors_bytes)
    with pytest.raises(WeightsError, match="Give its folder"):
        open_weights(tmp_path / "m.safetensors")
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"zip archive.*pickles"):
        open_weights(tmp_path / "pytorch_model.bin")
    (tmp_path / "fake.gguf").write_text("<html>")
    with pytest.raises(WeightsError, match=r"not a GGUF.*web page"):
        open_weights(tmp_path / "fake.gguf")
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(WeightsError, match="JSON"):
        open_weights(tmp_path / "config.json")
    (tmp_path / "raw").write_bytes(struct.pack("<Q", 3))
    with pytest.raises(WeightsError, match=r"neither .* \(starts with the bytes 03 00"):
        open_weights(tmp_path / "raw")
    (tmp_path / "paper.gguf").write_bytes(b"%PDF-1.4\n%\xe2\xe3")
    with pytest.raises(WeightsError, match=r"not a GGUF file: .* \(starts with %PDF-1.4\)"):
        open_weights(tmp_path / "paper.gguf")
