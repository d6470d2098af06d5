"""A few thousand damaged GGUFs: each is read whole or refused, soon and in little memory.

Where the fields lie comes from the gguf package, not from our reader.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.core.errors import HeadraceError, WeightsError
from headrace.weights.dequantize import dequantize
from headrace.weights.files.gguf import GgufFile

Bounded = Callable[[], AbstractContextManager[list[HeadraceError]]]

HOSTILE = [
    0, 1, 5, 9, 31, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63,
    2**64 - 32, 2**64 - 1,
]  # fmt: skip


def _read_whole(path: Path, bounded: Bounded) -> None:
    opened: list[GgufFile] = []
    with bounded():
        opened.append(GgufFile.open(path))
    for file in opened:
        for tensor in file.tensors.values():
            assert len(bytes(tensor.data)) == len(tensor.data)
            assert dequantize(tensor).shape == tensor.shape
        file.close()


@pytest.fixture(scope="module")
def number_fields(tmp_path_factory: pytest.TempPathFactory, gguf_bytes: bytes) -> list[range]:
    """Where the header's 4- and 8-byte numbers lie: counts, lengths, types, dims, offsets."""
    path = tmp_path_factory.mktemp("fields") / "small.gguf"
    path.write_bytes(gguf_bytes)
    reader = gguf.GGUFReader(path)
    base = reader.data.ctypes.data
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    spans = {
        range(at, at + part.dtype.itemsize)
        for field in fields
        for part in field.parts
        if part.dtype.kind in "ui" and part.dtype.itemsize >= 4
        for at in range(
            part.ctypes.data - base, part.ctypes.data - base + part.nbytes, part.dtype.itemsize
        )
    }
    return sorted(spans, key=lambda span: span.start)


def test_truncation_at_every_byte(tmp_path: Path, gguf_bytes: bytes, bounded: Bounded) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf_bytes)
    last = gguf.GGUFReader(path).tensors[-1]
    end = int(last.data_offset) + int(last.n_bytes)  # padding may follow
    for length in range(end):
        path.write_bytes(gguf_bytes[:length])
        with bounded() as refused:
            GgufFile.open(path)
        assert [type(error) for error in refused] == [WeightsError]
    path.write_bytes(gguf_bytes[:end])
    GgufFile.open(path).close()


def test_hostile_numbers_in_every_field(
    tmp_path: Path, gguf_bytes: bytes, number_fields: list[range], bounded: Bounded
) -> None:
    assert len(number_fields) > 60  # the fields were found
    path = tmp_path / "field.gguf"
    for span in number_fields:
        for value in HOSTILE:
            low = value & (256 ** len(span) - 1)
            bad = bytearray(gguf_bytes)
            bad[span.start : span.stop] = low.to_bytes(len(span), "little")
            path.write_bytes(bad)
            _read_whole(path, bounded)


def test_random_damage(tmp_path: Path, gguf_bytes: bytes, bounded: Bounded) -> None:
    rng = random.Random(20260801)
    path = tmp_path / "random.gguf"
    header = gguf_bytes.index(b"output.weight") + 64  # damage to the values changes nothing
    for _ in range(2500):
        bad = bytearray(gguf_bytes)
        for _ in range(rng.choice([1, 1, 2, 8])):
            at = rng.randrange(header)
            match rng.randrange(4):
                case 0:
                    bad[at] ^= 1 << rng.randrange(8)
                case 1:
                    bad[at] = rng.randrange(256)
                case 2:
                    del bad[at : at + rng.randrange(1, 9)]
                case _:
                    bad[at:at] = rng.randbytes(rng.randrange(1, 9))
        path.write_bytes(bad)
        _read_whole(path, bounded)


def test_random_values_are_still_read(tmp_path: Path, gguf_bytes: bytes) -> None:
    """Infinities and NaNs in the data are the file's affair, without a warning from numpy."""
    rng = np.random.default_rng(3)
    path = tmp_path / "values.gguf"
    start = gguf_bytes.index(b"output.weight") + 64
    for _ in range(20):
        path.write_bytes(gguf_bytes[:start] + rng.bytes(len(gguf_bytes) - start))
        with GgufFile.open(path) as file:
            for tensor in file.tensors.values():
                dequantize(tensor)
