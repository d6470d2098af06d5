"""Safetensors files and folders are read as their own library wrote them, or refused helpfully."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load, save_file

from headrace.core.errors import HeadraceError, WeightsError
from headrace.weights.dequantize import dequantize
from headrace.weights.files.safetensors import SafetensorsFile, SafetensorsFolder


def _file(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _entry(
    shape: object = (2,), offsets: object = (0, 8), dtype: object = "F32"
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _refusal(tmp_path: Path, content: bytes) -> HeadraceError:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(HeadraceError) as caught:
        SafetensorsFile.open(path)
    assert str(path) in caught.value.cause
    assert caught.value.remedy
    return caught.value


def test_values_match_the_library(model_folder: Path, safetensors_bytes: bytes) -> None:
    theirs = load(safetensors_bytes)
    with SafetensorsFolder.open(model_folder) as folder:
        assert folder.path == model_folder
        assert folder.config == {"model_type": "llama"}
        assert folder.left_out == {"model.position_ids": "I64"}
        assert set(folder.tensors) == set(theirs) - {"model.position_ids"}
        for name, tensor in folder.tensors.items():
            assert tensor.shape == tuple(theirs[name].shape)
            assert tensor.data.readonly
            assert torch.equal(torch.from_numpy(dequantize(tensor)), theirs[name].float())
        tensor = folder.tensors["lm_head.weight"]
        folder.release(tensor)
        assert torch.equal(torch.from_numpy(dequantize(tensor)), theirs[tensor.name].float())


def _write_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"layers.{i}.weight": torch.randn(3, i + 1) for i in range(4)}
    names = list(tensors)
    weight_map = {}
    for shard, chosen in (("a-1.safetensors", names[:1]), ("a-2.safetensors", names[1:])):
        save_file({name: tensors[name] for name in chosen}, folder / shard)
        weight_map.update(dict.fromkeys(chosen, shard))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_shards(tmp_path: Path) -> None:
    tensors = _write_shards(tmp_path)
    with SafetensorsFolder.open(tmp_path) as folder:
        assert set(folder.tensors) == set(tensors)
        for name, values in tensors.items():
            assert torch.equal(torch.from_numpy(dequantize(folder.tensors[name])), values)
            folder.release(folder.tensors[name])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    (tmp_path / "a-2.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"a-2\.safetensors: missing.* 3 tensors"):
        SafetensorsFolder.open(tmp_path)


def test_an_index_of_another_model(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    (tmp_path / "a-2.safetensors").write_bytes((tmp_path / "a-1.safetensors").read_bytes())
    with pytest.raises(WeightsError, match=r"no tensor 'layers\.1\.weight'"):
        SafetensorsFolder.open(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../a-1.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..\\a.safetensors",
     "C:a.safetensors", "a\0.safetensors", "", "..", "model.bin", 7, None, ["a.safetensors"]],
)  # fmt: skip
def test_an_index_may_not_lead_elsewhere(tmp_path: Path, shard: object) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    _write_shards(inside)
    (inside / "a-1.safetensors").rename(tmp_path / "a-1.safetensors")
    index = {"weight_map": {"layers.0.weight": shard}}
    (inside / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"weight_map 'layers\.0\.weight'.*same folder"):
        SafetensorsFolder.open(inside)


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{"])
def test_a_bad_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match=r"index\.json: "):
        SafetensorsFolder.open(tmp_path)


def test_a_single_file_of_any_name(model_folder: Path) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "weights.safetensors")
    with SafetensorsFolder.open(model_folder) as folder:
        assert "lm_head.weight" in folder.tensors


def test_several_files_need_an_index(model_folder: Path, safetensors_bytes: bytes) -> None:
    (model_folder / "model.safetensors").rename(model_folder / "a.safetensors")
    (model_folder / "b.safetensors").write_bytes(safetensors_bytes)
    with pytest.raises(WeightsError, match=r"2 safetensors files .*index\.json"):
        SafetensorsFolder.open(model_folder)


def test_pickles_are_never_read(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    torch.save({"w": torch.zeros(2)}, model_folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin.*convert it to safetensors"):
        SafetensorsFolder.open(model_folder)
    (model_folder / "pytorch_model.bin").unlink()
    with pytest.raises(WeightsError, match="no weights"):
        SafetensorsFolder.open(model_folder)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config.json"),
        ("[1]", "JSON list"),
        ("{'a': 1}", "not JSON"),
        ('{"a": ' + "[" * 40 + "]" * 40 + "}", "nesting"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ('{"a": ' + "1" * 5000 + "}", "not JSON"),
        ("", "empty"),
    ],
    ids=["none", "list", "not-json", "deep", "twice", "long-number", "empty"],
)
def test_a_bad_config(model_folder: Path, config: str | None, says: str) -> None:
    path = model_folder / "config.json"
    path.unlink()
    if config is not None:
        path.write_text(config)
    with pytest.raises(WeightsError, match=r"config\.json") as caught:
        SafetensorsFolder.open(model_folder)
    assert says in caught.value.cause


@pytest.mark.parametrize(
    ("content", "field", "found"),
    [
        (b"abc", "header length", "3 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "header length", str(2**63)),
        (struct.pack("<Q", 3) + b"{}", "header length", "found 3"),
        (_file(b"[]"), "header length", "JSON object"),
        (_file(b"{"), "header", "not JSON"),
        (_file(b'{"\xff": 1}'), "header", "not JSON"),
        (_file(b'{"a":' + b"[" * 100_000), "header", "nesting"),
        (_file({"w": _entry()}, bytes(7)), "tensor 'w': data_offsets", "[0, 8]"),
        (_file({"w": _entry()}, bytes(9)), "data", "9 bytes"),
        (_file({"w": _entry(offsets=(8, 16))}, bytes(16)), "tensor 'w': data_offsets", "[8, 16]"),
        (_file({"w": _entry(offsets=(8, 0))}, bytes(8)), "tensor 'w': data_offsets", "[8, 0]"),
        (_file({"w": _entry(offsets=(0, 2**64))}, bytes(8)), "tensor 'w': data_offsets", "1844"),
        (_file({"w": _entry(offsets=(-8, 0))}, bytes(8)), "tensor 'w': data_offsets", "-8"),
        (_file({"w": _entry(offsets=(0.0, 8.0))}, bytes(8)), "tensor 'w': data_offsets", "8.0"),
        (_file({"w": _entry(offsets=(False, 8))}, bytes(8)), "tensor 'w': data_offsets", "False"),
        (_file({"w": _entry(shape=(3,))}, bytes(8)), "tensor 'w': data_offsets", "8 bytes"),
        (_file({"w": _entry(shape=(2**63, 4))}, bytes(8)), "tensor 'w': data_offsets", "8 bytes"),
        (_file({"w": _entry(shape="2")}, bytes(8)), "tensor 'w': shape", "'2'"),
        (_file({"w": _entry(shape=(1,) * 9)}, bytes(4)), "tensor 'w': shape", "9 axes"),
        (_file({"w": _entry(dtype=4)}, bytes(8)), "tensor 'w': dtype", "int"),
        (_file({"w": 1}), "tensor 'w'", "expected an object"),
        (_file({"w": {"dtype": "F32"}}), "tensor 'w'", "data_offsets"),
        (_file({"w": _entry(), "v": _entry()}, bytes(8)), "tensor 'v': data_offsets", "[0, 8]"),
        (_file(b'{"w": 1, "w": 2}'), "header", "'w' twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_the_field_at_fault_is_named(
    tmp_path: Path, content: bytes, field: str, found: str
) -> None:
    error = _refusal(tmp_path, content)
    assert isinstance(error, WeightsError)
    assert f"bad.safetensors: {field}" in error.cause
    assert found in error.cause
    assert "expected" in error.cause
    deserialize: Callable[[bytes], object] = safetensors.deserialize
    with pytest.raises((safetensors.SafetensorError, ValueError)):
        deserialize(content)  # the library refuses each of these too


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    assert "Git LFS pointer" in _refusal(tmp_path, pointer).cause
    assert "web page" in _refusal(tmp_path, b"<!doctype html><html></html>").cause
    assert "zip" in _refusal(tmp_path, b"PK\x03\x04" + bytes(100)).cause


def test_scalars_and_empty_tensors(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}, path)
    file = SafetensorsFile.open(path)
    assert dequantize(file.tensors["scalar"]).tolist() == 2.5
    assert dequantize(file.tensors["none"]).shape == (0, 3)
    file.close()


def test_a_dtype_nobody_knows_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "new.safetensors"
    path.write_bytes(_file({"w": _entry(dtype="F3_E1M1", offsets=(0, 1))}, bytes(1)))
    file = SafetensorsFile.open(path)
    assert file.tensors == {}
    assert file.left_out == {"w": "F3_E1M1"}
    file.close()
