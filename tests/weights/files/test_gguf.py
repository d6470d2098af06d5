"""GGUF files are read as the gguf package wrote them, and refused in words that help."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.core.errors import HeadraceError, UnsupportedModelError, WeightsError
from headrace.weights.dequantize import dequantize
from headrace.weights.files.gguf import MAX_NAME_BYTES, TYPE_NAMES, GgufFile
from headrace.weights.tensor import FORMATS


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _file(
    *,
    metadata: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes = bytes(64),
) -> bytes:
    """A GGUF put together by hand, so that it can be wrong."""
    keys, infos = metadata or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys + infos)
    return head + bytes(-len(head) % 32) + data


def _info(name: bytes = b"w", dims: tuple[int, ...] = (16,), kind: int = 0, at: int = 0) -> bytes:
    return _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at)


def _u32(key: bytes, value: int) -> bytes:
    return _string(key) + struct.pack("<II", 4, value)


def _refusal(tmp_path: Path, content: bytes) -> HeadraceError:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(HeadraceError) as caught:
        GgufFile.open(path)
    assert str(path) in caught.value.cause
    assert caught.value.remedy
    return caught.value


def test_metadata_and_tensors_match_the_gguf_package(tmp_path: Path, gguf_bytes: bytes) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes)
    with GgufFile.open(path) as file:
        assert file.path == path
        assert file.metadata == {
            "general.architecture": "llama",
            "t.u8": 200,
            "t.i8": -100,
            "t.u16": 60_000,
            "t.i16": -30_000,
            "t.u32": 4_000_000_000,
            "t.i32": -2_000_000_000,
            "t.u64": 2**63 + 1,
            "t.i64": -(2**62),
            "t.f32": 0.5,
            "t.f64": 0.1,
            "t.yes": True,
            "t.no": False,
            "t.text": "Ġtwo words\n😀",
            "t.tokens": ["<s>", "", "é", "日本", "Ġthe"],
            "t.scores": [0.25, -1.5, 3.0],
            "t.kinds": [1, 2, 3, -4],
            "t.flags": [True, False, True],
            "t.nested": [[1, 2], [3]],
        }
        assert file.metadata["t.yes"] is True
        assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
            "blk.0.attn_q.weight": (3, 64),
            "blk.0.attn_norm.weight": (7,),
            "blk.0.ffn_up.weight": (2, 32),
            "output.weight": (2, 3, 4),
        }
        for theirs in gguf.GGUFReader(path).tensors:
            ours = file.tensors[theirs.name]
            assert ours.format.name == theirs.tensor_type.name
            assert ours.data.readonly
            assert bytes(ours.data) == theirs.data.tobytes()


def test_version_2_is_the_same_layout(tmp_path: Path, gguf_bytes: bytes) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(gguf_bytes[:4] + struct.pack("<I", 2) + gguf_bytes[8:])
    with GgufFile.open(path) as file:
        assert len(file.tensors) == 4


def test_default_model_matches_the_gguf_package(
    default_model_path: Path, default_reader: gguf.GGUFReader
) -> None:
    reader = default_reader
    with GgufFile.open(default_model_path) as file:
        theirs = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        assert file.metadata == theirs
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            ours = file.tensors[tensor.name]
            assert ours.shape == tuple(int(n) for n in reversed(tensor.shape))
            assert ours.format.name == tensor.tensor_type.name
            assert ours.data == tensor.data.reshape(-1).view(np.uint8).data


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_release_gives_memory_back_and_tensors_stay_readable(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((512, 1024)).astype(np.float32)
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("first", values)
    writer.add_tensor("second", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    def resident_kb() -> int:
        mine = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ", 1)[0]:
                mine = line.endswith(str(path))
            elif mine and line.startswith("Rss:"):
                return int(line.split()[1])
        return 0

    with GgufFile.open(path) as file:
        for tensor in file.tensors.values():
            assert np.array_equal(dequantize(tensor), values)
        assert resident_kb() >= 4096
        for tensor in file.tensors.values():
            file.release(tensor)
        assert resident_kb() <= 2 * mmap.PAGESIZE // 1024
        assert np.array_equal(dequantize(file.tensors["first"]), values)


def test_close_unmaps_unless_a_tensor_is_held(tmp_path: Path, gguf_bytes: bytes) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf_bytes)
    file = GgufFile.open(path)
    held = np.frombuffer(file.tensors["blk.0.attn_norm.weight"].data, "<f4")
    before = held.copy()
    file.close()
    file.close()
    assert np.array_equal(held, before)  # would end the process had it been unmapped
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) in maps.read_text()
        del held
        assert str(path) not in maps.read_text()


def test_a_file_without_tensors_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.gguf"
    empty = _string(b"y") + struct.pack("<I", 8) + _string(b"")
    path.write_bytes(_file(metadata=[_u32(b"x", 7), empty], data=b""))
    with GgufFile.open(path) as file:
        assert file.metadata == {"x": 7, "y": ""}
        assert file.tensors == {}


def test_integer_tensors_are_left_out_and_remembered(tmp_path: Path) -> None:
    path = tmp_path / "ids.gguf"
    path.write_bytes(
        _file(tensors=[_info(b"ids", kind=26), _info(b"w", (4,), at=64)], data=bytes(96))
    )
    with GgufFile.open(path) as file:
        assert list(file.tensors) == ["w"]
        assert file.left_out == {"ids": "I32"}


def test_the_table_of_types_is_the_gguf_packages() -> None:
    theirs = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert theirs.items() <= TYPE_NAMES.items()
    for format in FORMATS.values():
        kind = gguf.GGMLQuantizationType[format.name]
        assert gguf.GGML_QUANT_SIZES[kind] == (format.block_values, format.block_bytes)


@pytest.mark.parametrize("kind", ["IQ2_XS", "Q2_K", "Q3_K", "MXFP4", "TQ1_0"])
def test_unsupported_quantization_is_named(tmp_path: Path, kind: str) -> None:
    number = int(gguf.GGMLQuantizationType[kind])
    error = _refusal(tmp_path, _file(tensors=[_info(b"blk.7.ffn_up.weight", (256,), number)]))
    assert isinstance(error, UnsupportedModelError)
    assert f"type {kind};" in error.cause
    assert "'blk.7.ffn_up.weight'" in error.cause
    assert all(name in error.cause for name in FORMATS)


def test_unknown_type_number(tmp_path: Path) -> None:
    error = _refusal(tmp_path, _file(tensors=[_info(kind=99)]))
    assert isinstance(error, UnsupportedModelError)
    assert "number 99" in error.cause


def test_big_endian_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="big-endian"):
        GgufFile.open(path)


def test_split_files_are_refused(tmp_path: Path) -> None:
    split = _string(b"split.count") + struct.pack("<IH", 2, 3)
    error = _refusal(tmp_path, _file(metadata=[split], tensors=[_info()]))
    assert isinstance(error, UnsupportedModelError)
    assert "3 parts" in error.cause
    assert "--merge" in error.remedy


@pytest.mark.parametrize(
    ("content", "looks_like"),
    [
        (b"\x80\x02}q\x00.", "pickle"),
        (b"PK\x03\x04" + bytes(60), "zip"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\n<html><body>Sign in", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"tjgg\x03\x00\x00\x00", "before GGUF"),
        (struct.pack("<Q", 2) + b'{"a":1}', "safetensors"),
        (b'{"error": "not found"}', "JSON"),
        (b"\x00\x01\x02\x03garbage", "00 01 02 03"),
        (b"G", "47"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_other_files_are_told_apart(tmp_path: Path, content: bytes, looks_like: str) -> None:
    error = _refusal(tmp_path, content)
    assert isinstance(error, WeightsError)
    assert "not a GGUF" in error.cause
    assert looks_like in error.cause


@pytest.mark.parametrize(
    ("content", "field", "found"),
    [
        (b"GGUF", "version", "0 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version", "found 1;"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "tensor count", str(2**63)),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "metadata count", str(2**64 - 1)),
        (_file(metadata=[_string(b"")]), "metadata key 0: length", "found 0;"),
        (_file(metadata=[_u32(b"a", 1), _u32(b"a", 2)]), "metadata 'a'", "twice"),
        (_file(metadata=[_string(b"a") + struct.pack("<I", 13)]), "metadata 'a': type", "13"),
        (_file(metadata=[_string(b"a") + struct.pack("<IB", 7, 2)]), "metadata 'a'", "value 2"),
        (
            _file(metadata=[_string(b"a") + struct.pack("<I", 8) + _string(b"\xff")]),
            "metadata 'a'",
            "not UTF-8",
        ),
        (  # the last string of the last value, in a file that ends there
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + _string(b"a")
            + struct.pack("<IIQQ", 9, 8, 1, 9)
            + b"x",
            "metadata 'a'[0]: length",
            "found 9;",
        ),
        (
            _file(metadata=[_string(b"a") + struct.pack("<IIQ", 9, 8, 2**61)]),
            "metadata 'a': count",
            str(2**61),
        ),
        (
            _file(metadata=[_string(b"a") + struct.pack("<I" + "IQ" * 5, 9, *[9, 1] * 5)]),
            "metadata 'a'",
            "nested",
        ),
        (_file(metadata=[_u32(b"general.alignment", 48)]), "general.alignment", "48"),
        (_file(metadata=[_u32(b"general.alignment", 0)]), "general.alignment", "0"),
        (_file(metadata=[_u32(b"general.alignment", 1 << 31)]), "general.alignment", "2147483648"),
        (_file(tensors=[_info(b"n" * (MAX_NAME_BYTES + 1))]), "tensor 0: name: length", "257"),
        (_file(tensors=[_info(), _info()]), "tensor 'w'", "twice"),
        (_file(tensors=[_info(dims=())]), "tensor 'w': number of dimensions", "found 0;"),
        (_file(tensors=[_info(dims=(1,) * 5)]), "tensor 'w': number of dimensions", "found 5;"),
        (_file(tensors=[_info(dims=(16, 0))]), "tensor 'w': dimensions", "[16, 0]"),
        (_file(tensors=[_info(dims=(48,), kind=2)]), "tensor 'w': dimension 0", "48"),
        (_file(tensors=[_info(at=8)]), "tensor 'w': offset", "found 8;"),
        (_file(tensors=[_info(at=32)]), "tensor 'w': offset", "32"),
        (_file(tensors=[_info(at=2**64 - 32)]), "tensor 'w': offset", str(2**64 - 32)),
        (_file(tensors=[_info(dims=(2**63, 2**63))]), "tensor 'w': offset", str(2**128)),
        (_file(tensors=[_info(b"a"), _info(b"b", at=32)]), "tensor 'b': offset", "found 32;"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_the_field_at_fault_is_named(
    tmp_path: Path, content: bytes, field: str, found: str
) -> None:
    error = _refusal(tmp_path, content)
    assert isinstance(error, WeightsError)
    assert f"bad.gguf: {field}" in error.cause or f"metadata '{field}'" in error.cause
    assert found in error.cause
    assert "expected" in error.cause


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="No such file"):
        GgufFile.open(tmp_path / "none.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        GgufFile.open(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(WeightsError, match="empty"):
        GgufFile.open(tmp_path / "empty.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(WeightsError, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe.gguf")
