"""Reads safetensors: one file's header and tensors, and a folder as `transformers` saves it.

Tensors are views of mapped files; every length and offset is checked before it is used. Pickles
are never read. Knows nothing of what config.json means to a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headrace.core.closes import Closes
from headrace.core.errors import WeightsError
from headrace.weights.files.json_file import MAX_JSON_BYTES, parse_object, read_object
from headrace.weights.files.mapped import DAMAGED, MappedFile, describe_content, shown
from headrace.weights.tensor import CODE_FORMATS, FORMATS, Tensor

FLOAT_DTYPES = ("F32", "F16", "BF16")
MAX_DIMS = 8
_LENGTH_BYTES = 8
_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Bytes per value of dtypes that we don't read: their offsets are checked too.
_OTHER_DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "U32": 4, "I32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as the header describes it: offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One mapped file. `left_out` has the tensors whose dtype is not a float type; those whose
    dtype quantized checkpoints use for codes are also in `codes`."""

    def __init__(self, file: MappedFile) -> None:
        self.path = file.path
        self._file = file
        self.tensors: dict[str, Tensor] = {}
        self.codes: dict[str, Tensor] = {}
        self.left_out: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        data_start = _LENGTH_BYTES + _header_bytes(file)
        header = parse_object(file.view[_LENGTH_BYTES:data_start], file.path, "header")
        for entry in _read_entries(file.path, header, file.size - data_start):
            is_float = entry.dtype in FLOAT_DTYPES
            if not is_float:
                self.left_out[entry.name] = entry.dtype
                if entry.dtype not in CODE_FORMATS:
                    continue
            start, size = data_start + entry.begin, entry.end - entry.begin
            self._spans[entry.name] = (start, size)
            (self.tensors if is_float else self.codes)[entry.name] = Tensor(
                name=entry.name,
                format=(FORMATS if is_float else CODE_FORMATS)[entry.dtype],
                shape=entry.shape,
                data=file.view[start : start + size],
            )

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        file = MappedFile.open(path)
        try:
            return cls(file)
        except BaseException:
            file.close()
            raise

    def release(self, tensor: Tensor) -> None:
        self._file.release(*self._spans[tensor.name])

    def close(self) -> None:
        self.tensors.clear()
        self.codes.clear()
        self._file.close()


class SafetensorsFolder(Closes):
    """config.json and the weights beside it, in one file or in shards."""

    def __init__(self, path: Path, config: dict[str, object]) -> None:
        self.path = path
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.codes: dict[str, Tensor] = {}
        self.left_out: dict[str, str] = {}
        self._files: list[SafetensorsFile] = []
        self._owners: dict[str, SafetensorsFile] = {}

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFolder:
        found = cls(folder, read_config(folder))
        try:
            found._open_files()
        except BaseException:
            found.close()
            raise
        return found

    @property
    def stored(self) -> dict[str, Tensor]:
        return {**self.tensors, **self.codes}

    def release(self, tensor: Tensor) -> None:
        """Drop a tensor's pages from memory once it is packed elsewhere; it can be read again."""
        self._owners[tensor.name].release(tensor)

    def close(self) -> None:
        self.tensors.clear()
        self.codes.clear()
        for file in self._files:
            file.close()

    def _open_files(self) -> None:
        index = self.path / _INDEX
        if not (self.path / _WHOLE).exists() and index.exists():
            self._open_shards(index)
            return
        file = SafetensorsFile.open(_only_file(self.path))
        self._files.append(file)
        self._take(file, [*file.tensors, *file.left_out])

    def _open_shards(self, index: Path) -> None:
        """Each tensor from the shard that the index names for it, and no others."""
        for shard, names in _read_index(index).items():
            path = self.path / shard
            if not path.exists():
                raise WeightsError(
                    f"{path}: missing; {_INDEX} says that it holds {len(names)} tensors.",
                    "Fetch the missing shards.",
                )
            file = SafetensorsFile.open(path)
            self._files.append(file)
            for name in names:
                if name not in file.tensors and name not in file.left_out:
                    raise WeightsError(
                        f"{path}: no tensor {shown(name)}, which {_INDEX} says is there.",
                        "Index and shards belong to different models: fetch them together.",
                    )
            self._take(file, names)

    def _take(self, file: SafetensorsFile, names: list[str]) -> None:
        for name in names:
            self._owners[name] = file
            if name in file.tensors:
                self.tensors[name] = file.tensors[name]
                continue
            self.left_out[name] = file.left_out[name]
            if name in file.codes:
                self.codes[name] = file.codes[name]


def _header_bytes(file: MappedFile) -> int:
    length = int.from_bytes(file.view[:_LENGTH_BYTES], "little")
    most = min(file.size - _LENGTH_BYTES, MAX_JSON_BYTES)
    if length > most or file.head()[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        looks = describe_content(file.head())
        guess = "" if looks == "a safetensors file" else f" The file looks like {looks}."
        raise WeightsError(
            f"{file.path}: header length: found {length}, in a file of {file.size} bytes; "
            f"expected a JSON object of at most {max(most, 0)} bytes after it.{guess}",
            DAMAGED,
        )
    return length


def _read_entries(path: Path, header: dict[str, object], data_bytes: int) -> list[_Entry]:
    """All entries in order of their offsets, which must be without gaps."""
    header.pop("__metadata__", None)
    entries = sorted(
        (_read_entry(path, name, value) for name, value in header.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    at = 0
    for entry in entries:
        if entry.begin != at or entry.end > data_bytes:
            raise _malformed(
                path,
                f"tensor {shown(entry.name)}: data_offsets",
                [entry.begin, entry.end],
                f"a start at {at}, where the tensor before it ends, and an end by {data_bytes}, "
                "where the file ends",
            )
        at = entry.end
    if at != data_bytes:
        raise _malformed(path, "data", f"{data_bytes} bytes", f"{at}, where the last tensor ends")
    return entries


def _read_entry(path: Path, name: str, value: object) -> _Entry:
    field = f"tensor {shown(name)}"
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise _malformed(path, field, "no such entry", "an object of dtype, shape, data_offsets")
    dtype = value["dtype"]
    if not isinstance(dtype, str):
        raise _malformed(path, f"{field}: dtype", type(dtype).__name__, "a string")
    shape = _naturals(path, f"{field}: shape", value["shape"])
    if len(shape) > MAX_DIMS:
        raise _malformed(path, f"{field}: shape", f"{len(shape)} axes", f"at most {MAX_DIMS}")
    offsets = _naturals(path, f"{field}: data_offsets", value["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _malformed(
            path, f"{field}: data_offsets", shown(str(list(offsets))), "a start and an end after it"
        )
    size = FORMATS[dtype].block_bytes if dtype in FLOAT_DTYPES else _OTHER_DTYPE_BYTES.get(dtype)
    span = offsets[1] - offsets[0]
    if size is not None and span != math.prod(shape) * size:
        raise _malformed(
            path,
            f"{field}: data_offsets",
            f"{span} bytes",
            f"{math.prod(shape) * size}, as shape {list(shape)} of {dtype} takes",
        )
    return _Entry(name, dtype, shape, offsets[0], offsets[1])


def _naturals(path: Path, field: str, value: object) -> tuple[int, ...]:
    # The limit is the safetensors library's own: it uses 64-bit numbers.
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**64 for n in value):
        raise _malformed(path, field, shown(str(value)[:100]), "a list of non-negative integers")
    return tuple(value)


def read_config(folder: Path) -> dict[str, object]:
    path = folder / "config.json"
    if not path.is_file():
        raise WeightsError(
            f"{folder}: no config.json; expected config.json, safetensors and tokenizer.json.",
            "Give a folder as transformers saves it, or a .gguf file.",
        )
    return read_object(path)


def _only_file(folder: Path) -> Path:
    whole = folder / _WHOLE
    if whole.exists():
        return whole
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4]) + (", ..." if len(files) > 4 else "")
        raise WeightsError(
            f"{folder}: {len(files)} safetensors files ({names}) and no {_INDEX}.",
            f"Add their {_INDEX}.",
        )
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise WeightsError(
            f"{folder}: only pickled weights ({pickles[0]}); expected {_WHOLE}.",
            "Loading a pickle can run code, so Headrace never does: convert it to safetensors.",
        )
    raise WeightsError(
        f"{folder}: no weights; expected {_WHOLE}, or shards with {_INDEX}.",
        "Fetch the weights into this folder.",
    )


def _read_index(path: Path) -> dict[str, list[str]]:
    """Shard name -> the tensors taken from it."""
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _malformed(path, "weight_map", type(weight_map).__name__, "an object with names")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            raise _malformed(
                path,
                f"weight_map {shown(name)}",
                shown(str(shard)[:100]),
                "the name of a .safetensors file in the same folder",
            )
        shards.setdefault(shard, []).append(name)
    return shards


def _is_plain_name(name: str) -> bool:
    """Only a file's name, without anything that could leave its folder on any system."""
    return (
        name.endswith(".safetensors") and len(name) <= 255 and not any(c in name for c in "/\\:\0")
    )


def _malformed(path: Path, field: str, found: object, expected: str) -> WeightsError:
    return WeightsError(f"{path}: {field}: found {found}; expected {expected}.", DAMAGED)
