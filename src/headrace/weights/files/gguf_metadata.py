"""Reads a GGUF header: integers, strings and the typed metadata values.

Nothing in the file is trusted: a count or length is compared with the bytes that are left before
anything is read or allocated. Knows nothing of tensors or of what the keys mean.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np

from headrace.core.errors import WeightsError
from headrace.weights.files.mapped import DAMAGED, MappedFile, shown

MetadataValue: TypeAlias = "bool | int | float | str | list[MetadataValue]"

MAX_KEY_BYTES = 65_535  # from the GGUF specification
MAX_ARRAY_DEPTH = 4
# In all arrays of a file together. The largest vocabularies need about one million. This bounds
# memory, as a Python list takes many times the bytes of the file.
MAX_ARRAY_VALUES = 8_000_000

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    _BOOL: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_SMALLEST = {
    **{number: dtype.itemsize for number, dtype in _NUMBERS.items()},
    _STRING: 8,  # a length
    _ARRAY: 12,  # a type and a count
}


class Cursor:
    """A read position in a mapped file; reading past the end raises WeightsError."""

    def __init__(self, file: MappedFile) -> None:
        self.at = 0
        self._path: Path = file.path
        self._view = file.view
        self._end = file.size
        self._array_values_left = MAX_ARRAY_VALUES

    def malformed(self, field: str, found: object, expected: str) -> WeightsError:
        return WeightsError(f"{self._path}: {field}: found {found}; expected {expected}.", DAMAGED)

    def need(self, field: str, wanted_bytes: int) -> None:
        left = self._end - self.at
        if wanted_bytes > left:
            raise self.malformed(
                field, f"{left} bytes before the end of the file", f"at least {wanted_bytes}"
            )

    def u32(self, field: str) -> int:
        self.need(field, 4)
        (value,) = _U32.unpack_from(self._view, self.at)
        self.at += 4
        return int(value)

    def u64(self, field: str) -> int:
        self.need(field, 8)
        (value,) = _U64.unpack_from(self._view, self.at)
        self.at += 8
        return int(value)

    def count(self, field: str, least_bytes_each: int, most: int) -> int:
        """A count of items that follow, each of at least `least_bytes_each` bytes."""
        count = self.u64(field)
        fit = min((self._end - self.at) // least_bytes_each, most)
        if count > fit:
            raise self.malformed(
                field, count, f"at most {fit} (by the bytes left in the file and Headrace's limits)"
            )
        return count

    def string(self, field: str, most_bytes: int | None = None) -> str:
        length = self.u64(f"{field}: length")
        if most_bytes is not None and not 0 < length <= most_bytes:
            raise self.malformed(f"{field}: length", length, f"1 to {most_bytes}")
        self.need(field, length)
        start = self.at
        self.at += length
        try:
            return str(self._view[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.malformed(
                field, f"bytes that are not UTF-8 ({error.reason})", "UTF-8"
            ) from None

    def value(self, field: str) -> MetadataValue:
        kind = self._kind(f"{field}: type")
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self._array(field, 1)
        return self._numbers(field, kind, 1)[0]

    def _kind(self, field: str) -> int:
        kind = self.u32(field)
        if kind not in _SMALLEST:
            raise self.malformed(field, kind, "a GGUF value type, 0 to 12")
        return kind

    def _array(self, field: str, depth: int) -> list[MetadataValue]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.malformed(
                field, f"arrays nested more than {MAX_ARRAY_DEPTH} deep", "fewer levels"
            )
        kind = self._kind(f"{field}: element type")
        count = self.count(f"{field}: count", _SMALLEST[kind], self._array_values_left)
        self._array_values_left -= count
        if kind == _STRING:
            return self._strings(field, count)
        if kind == _ARRAY:
            return [self._array(field, depth + 1) for _ in range(count)]
        return self._numbers(field, kind, count)

    def _numbers(self, field: str, kind: int, count: int) -> list[MetadataValue]:
        dtype = _NUMBERS[kind]
        size = count * dtype.itemsize
        self.need(field, size)
        values = np.frombuffer(self._view[self.at : self.at + size], dtype)
        self.at += size
        if kind == _BOOL:
            if count and int(values.max()) > 1:
                raise self.malformed(field, f"a bool of value {values.max()}", "0 or 1")
            values = values.astype(np.bool_)
        numbers: list[MetadataValue] = values.tolist()
        return numbers

    def _strings(self, field: str, count: int) -> list[MetadataValue]:
        """As `string`, with a tight loop: vocabularies are long."""
        view, at, end, unpack = self._view, self.at, self._end, _U64.unpack_from
        strings: list[MetadataValue] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + unpack(view, at)[0]
                if at > end:
                    raise self.malformed(
                        f"{field}[{len(strings)}]: length",
                        at - start,
                        f"at most {end - start}, the bytes left",
                    )
                strings.append(str(view[start:at], "utf-8"))
        except struct.error:
            raise self.malformed(
                f"{field}[{len(strings)}]: length", "the end of the file", "8 bytes"
            ) from None
        except UnicodeDecodeError as error:
            raise self.malformed(
                f"{field}[{len(strings)}]", f"bytes that are not UTF-8 ({error.reason})", "UTF-8"
            ) from None
        self.at = at
        return strings


def read_metadata(cursor: Cursor, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        field = f"metadata {shown(key)}"
        if key in metadata:
            raise cursor.malformed(field, "this key twice", "each key once")
        metadata[key] = cursor.value(field)
    return metadata
