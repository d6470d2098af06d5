"""A few thousand damaged safetensors: read whole or refused, soon, in little memory, and never
read differently from the library that defines the format."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import safetensors

from headrace.core.errors import HeadraceError, WeightsError
from headrace.weights.dequantize import dequantize
from headrace.weights.files.safetensors import FLOAT_DTYPES, SafetensorsFile

deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
Bounded = Callable[[], AbstractContextManager[list[HeadraceError]]]

HOSTILE: list[object] = [
    0, 1, -1, 7, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 0.5, 1e308,
    True, None, "", "F16", [], [0], [[0, 1]], {}, [2**63, 2**63], [2**32] * 8, [1] * 4000,
    "x" * 4000,
]  # fmt: skip


def _compare(path: Path, content: bytes, bounded: Bounded) -> bool:
    """Read by us and by the library; whether both took the file."""
    path.write_bytes(content)
    opened: list[SafetensorsFile] = []
    with bounded() as refused:
        opened.append(SafetensorsFile.open(path))
    try:
        theirs = dict(deserialize(content))
    except (safetensors.SafetensorError, ValueError):
        theirs = None
    for file in opened:
        for tensor in file.tensors.values():
            assert dequantize(tensor).shape == tensor.shape
        if theirs is not None:
            assert set(file.tensors) | set(file.left_out) == set(theirs)
            for name, entry in theirs.items():
                if entry["dtype"] in FLOAT_DTYPES:
                    assert bytes(file.tensors[name].data) == bytes(entry["data"])
                    assert list(file.tensors[name].shape) == entry["shape"]
        file.close()
    # Stricter than the library only by our limits and by refusing a name given twice.
    if theirs is not None and refused:
        assert any(word in refused[0].cause for word in ("twice", "axes"))
    return theirs is not None and not refused


def _parts(content: bytes) -> tuple[dict[str, dict[str, object]], bytes]:
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_truncation_at_every_byte(
    tmp_path: Path, safetensors_bytes: bytes, bounded: Bounded
) -> None:
    path = tmp_path / "cut.safetensors"
    for length in range(len(safetensors_bytes)):
        path.write_bytes(safetensors_bytes[:length])
        with bounded() as refused:
            SafetensorsFile.open(path)
        assert [type(error) for error in refused] == [WeightsError]
    assert _compare(path, safetensors_bytes, bounded)


def test_hostile_values_in_every_field(
    tmp_path: Path, safetensors_bytes: bytes, bounded: Bounded
) -> None:
    path = tmp_path / "field.safetensors"
    header, data = _parts(safetensors_bytes)
    for name in header:
        for key in [None, *header[name]]:
            for value in HOSTILE:
                changed: dict[str, object] = dict(header)
                changed[name] = value if key is None else {**header[name], key: value}
                _compare(path, _join(changed, data), bounded)
        for key in ("shape", "data_offsets"):
            for at in range(2 if name != "__metadata__" else 0):
                for value in HOSTILE:
                    numbers = header[name][key]
                    assert isinstance(numbers, list)
                    numbers = [*numbers[:at], value, *numbers[at + 1 :]]
                    changed = {**header, name: {**header[name], key: numbers}}
                    _compare(path, _join(changed, data), bounded)


def test_hostile_header_lengths(tmp_path: Path, safetensors_bytes: bytes, bounded: Bounded) -> None:
    path = tmp_path / "length.safetensors"
    (right,) = struct.unpack("<Q", safetensors_bytes[:8])
    for value in [0, 1, right - 1, right + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]:
        assert not _compare(path, struct.pack("<Q", value) + safetensors_bytes[8:], bounded)


def test_random_damage(tmp_path: Path, safetensors_bytes: bytes, bounded: Bounded) -> None:
    rng = random.Random(20260802)
    path = tmp_path / "random.safetensors"
    (length,) = struct.unpack("<Q", safetensors_bytes[:8])
    taken = 0
    for _ in range(3000):
        text = bytearray(safetensors_bytes[8 : 8 + length])
        for _ in range(rng.choice([1, 1, 1, 3])):
            at = rng.randrange(len(text))
            match rng.randrange(4):
                case 0:
                    text[at] ^= 1 << rng.randrange(8)
                case 1:
                    text[at] = rng.choice(b'0123456789-.eE[]{},:"\\ntfu')
                case 2:
                    del text[at : at + rng.randrange(1, 5)]
                case _:
                    text[at:at] = bytes(rng.choices(b'0123456789[]{},:"', k=rng.randrange(1, 4)))
        # The length mostly stays true, so that damage reaches past the first check.
        stated = len(text) if rng.random() < 0.9 else rng.randrange(2 * length)
        content = struct.pack("<Q", stated) + text + safetensors_bytes[8 + length :]
        taken += _compare(path, content, bounded)
    assert 20 < taken < 2900  # neither all refused nor all taken: damage of both kinds


@pytest.mark.parametrize(
    "text",
    [
        b'{"' + b'\\"' * 1_000_000,
        b"{" + b'"' * 2_000_001,
        b"{" * 2_000_000,
        b'{"a":[' + b"[]," * 600_000,
    ],
    ids=["escapes", "quotes", "braces", "lists"],
)
def test_texts_made_to_be_slow(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "slow.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    # A reader whose time grows with the square of the text would meet the suite's time limit.
    with pytest.raises(WeightsError, match="header: "):
        SafetensorsFile.open(path)
