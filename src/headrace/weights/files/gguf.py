"""Reads GGUF files (versions 2 and 3, little-endian): metadata, and tensors as mapped bytes.

Every number in the header is checked against the file before it is used; see gguf_metadata.py.
Knows nothing of what the metadata means to a model, and does no arithmetic on tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.core.closes import Closes
from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.weights.files.gguf_metadata import Cursor, MetadataValue, read_metadata
from headrace.weights.files.mapped import DAMAGED, MappedFile, describe_content, shown
from headrace.weights.tensor import FORMATS, Tensor, TensorFormat

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 65_536
MAX_METADATA_KEYS = 65_536
MAX_NAME_BYTES = 256  # llama.cpp's own limit is 64
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20
_LEAST_KEY_BYTES = 8 + 1 + 4 + 1  # a name's length, its shortest text, a type, the shortest value
_LEAST_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # the same, dims, one dim, type, offset

# GGUF's type numbers -> names, including those we don't read, for error messages.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "Q4_2", 5: "Q4_3", 6: "Q5_0", 7: "Q5_1",
    8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
    22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    30: "BF16", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Plain numbers that no decoder weight uses: such tensors are skipped.
_LEFT_OUT_FORMATS = {
    f.name: f
    for f in (
        TensorFormat("I8", 1, 1),
        TensorFormat("I16", 1, 2),
        TensorFormat("I32", 1, 4),
        TensorFormat("I64", 1, 8),
        TensorFormat("F64", 1, 8),
    )
}


@dataclass(frozen=True, slots=True)
class _Info:
    """A tensor as the header describes it; dims innermost first, as in GGUF."""

    name: str
    dims: tuple[int, ...]
    format: TensorFormat
    offset: int

    @property
    def field(self) -> str:
        return f"tensor {shown(self.name)}"

    @property
    def size_bytes(self) -> int:
        return math.prod(self.dims) // self.format.block_values * self.format.block_bytes


class GgufFile(Closes):
    """An open GGUF. Tensors are views of the mapped file, and stay valid after `close`."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self._file = file
        cursor = Cursor(file)
        tensors, keys = _read_counts(cursor, file)
        self.metadata: dict[str, MetadataValue] = read_metadata(cursor, keys)
        _refuse_split(file.path, self.metadata)
        alignment = _alignment(cursor, self.metadata)
        infos = _read_infos(cursor, file.path, tensors)
        self._data_start = cursor.at + -cursor.at % alignment
        _check_spans(cursor, infos, alignment, file.size - self._data_start)
        self.tensors: dict[str, Tensor] = {}
        self.stored = self.tensors
        self.left_out: dict[str, str] = {}  # tensor name -> a type that we don't read
        self._spans: dict[str, tuple[int, int]] = {}  # tensor name -> start in the file, bytes
        for info in infos:
            if info.format.name in FORMATS:
                self._add(info)
            else:
                self.left_out[info.name] = info.format.name
        file.release(0, cursor.at)  # the vocabulary was copied into Python objects

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        file = MappedFile.open(path)
        try:
            return cls(file)
        except BaseException:
            file.close()
            raise

    def _add(self, info: _Info) -> None:
        start, size = self._data_start + info.offset, info.size_bytes
        self._spans[info.name] = (start, size)
        self.tensors[info.name] = Tensor(
            name=info.name,
            format=info.format,
            shape=info.dims[::-1],
            data=self._file.view[start : start + size],
        )

    def release(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from memory once it is packed elsewhere; it can be read again."""
        self._file.release(*self._spans[tensor.name])

    def close(self) -> None:
        self.tensors.clear()
        self._file.close()


def _read_counts(cursor: Cursor, file: MappedFile) -> tuple[int, int]:
    """The fixed part of the header -> number of tensors, number of metadata keys."""
    head = file.head()
    if not head.startswith(MAGIC):
        raise WeightsError(
            f"{file.path}: not a GGUF file: {describe_content(head)}.",
            "Give a .gguf file, or a folder with config.json and safetensors.",
        )
    cursor.at = len(MAGIC)
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:  # 3 with swapped bytes is 0x03000000
        raise UnsupportedModelError(
            f"{file.path}: a big-endian GGUF; expected a little-endian one.",
            "Fetch the usual little-endian file, or convert this one with gguf_convert_endian.",
        )
    if version not in VERSIONS:
        raise cursor.malformed("version", version, " or ".join(map(str, VERSIONS)))
    tensors = cursor.count("tensor count", _LEAST_TENSOR_BYTES, MAX_TENSORS)
    keys = cursor.count("metadata count", _LEAST_KEY_BYTES, MAX_METADATA_KEYS)
    return tensors, keys


def _refuse_split(path: Path, metadata: dict[str, MetadataValue]) -> None:
    parts = metadata.get("split.count", 0)
    if type(parts) is not int:
        raise WeightsError(
            f"{path}: metadata 'split.count': found {parts!r}; expected a whole number.", DAMAGED
        )
    if parts > 1:
        raise UnsupportedModelError(
            f"{path}: one of {parts} parts of a split GGUF (split.count); expected a single file.",
            "Join the parts first: llama-gguf-split --merge FIRST-PART OUTPUT.gguf",
        )


def _alignment(cursor: Cursor, metadata: dict[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        type(value) is not int
        or not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT
        or value & (value - 1) != 0
    ):
        raise cursor.malformed(
            "metadata 'general.alignment'",
            shown(str(value)),
            f"a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
        )
    return value


def _read_infos(cursor: Cursor, path: Path, count: int) -> list[_Info]:
    infos: dict[str, _Info] = {}
    for index in range(count):
        name = cursor.string(f"tensor {index}: name", MAX_NAME_BYTES)
        field = f"tensor {shown(name)}"
        if name in infos:
            raise cursor.malformed(field, "this name twice", "each name once")
        dim_count = cursor.u32(f"{field}: number of dimensions")
        if not 1 <= dim_count <= MAX_DIMS:
            raise cursor.malformed(f"{field}: number of dimensions", dim_count, f"1 to {MAX_DIMS}")
        dims = tuple(cursor.u64(f"{field}: dimension {axis}") for axis in range(dim_count))
        if 0 in dims:
            raise cursor.malformed(f"{field}: dimensions", list(dims), "each at least 1")
        format = _format(path, field, cursor.u32(f"{field}: type"))
        if dims[0] % format.block_values:
            raise cursor.malformed(
                f"{field}: dimension 0",
                dims[0],
                f"a multiple of {format.block_values}, which is one block of {format.name}",
            )
        infos[name] = _Info(name, dims, format, cursor.u64(f"{field}: offset"))
    return list(infos.values())


def _format(path: Path, field: str, number: int) -> TensorFormat:
    name = TYPE_NAMES.get(number, f"number {number}, unknown to Headrace")
    format = FORMATS.get(name) or _LEFT_OUT_FORMATS.get(name)
    if format is None:
        raise UnsupportedModelError(
            f"{path}: {field}: type {name}; supported are {', '.join(FORMATS)}.",
            "Use a file of the same model in one of these, for example Q4_K_M or Q8_0.",
        )
    return format


def _check_spans(cursor: Cursor, infos: list[_Info], alignment: int, data_bytes: int) -> None:
    """Every tensor is aligned, inside the file, and does not overlap others."""
    end_before, before = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset % alignment:
            raise cursor.malformed(
                f"{info.field}: offset", info.offset, f"a multiple of the alignment, {alignment}"
            )
        if info.offset < end_before:
            raise cursor.malformed(
                f"{info.field}: offset", info.offset, f"{end_before} or more, where {before} ends"
            )
        end_before, before = info.offset + info.size_bytes, info.field
        if end_before > data_bytes:
            raise cursor.malformed(
                f"{info.field}: offset",
                f"{info.offset} (and {info.size_bytes} bytes of {info.format.name} "
                f"{list(info.dims[::-1])} from there)",
                f"an end within the {max(data_bytes, 0)} bytes of tensor data that the file has",
            )
