"""Opens the weights at a path, and finds the tensors that a model family names.

Knows the kinds of files, and reports what is missing. Knows nothing of families: names and shapes
come in as references.
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from headrace.core.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from headrace.models.decoder import DecoderWeights
from headrace.models.refs import TensorRef, WeightRef
from headrace.weights.dummy import DummyFolder, dummy_tensor
from headrace.weights.files.gguf import MAGIC, GgufFile
from headrace.weights.files.mapped import MappedFile, describe_content, shown
from headrace.weights.files.safetensors import FLOAT_DTYPES, SafetensorsFolder
from headrace.weights.methods.quantization import read_method
from headrace.weights.methods.quantized import OTHER_MODEL, Method
from headrace.weights.tensor import FORMATS, Tensor
from headrace.weights.weight import Part, Weight

_ACCEPTED = "Give a .gguf file, or a folder with config.json, safetensors and tokenizer.json."


class WeightsFile(Protocol):
    """What GgufFile and SafetensorsFolder have in common."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def stored(self) -> Mapping[str, Tensor]:
        """All tensors of the model, including the codes of quantized ones."""
        ...

    @property
    def left_out(self) -> Mapping[str, str]:
        """Tensors of a type that Headrace does not read: name -> type."""
        ...

    def release(self, tensor: Tensor) -> None: ...

    def close(self) -> None: ...


OpenFile = GgufFile | SafetensorsFolder | DummyFolder


def open_weights(path: Path, load_format: str = "auto") -> OpenFile:
    """Open the weights at `path`, of any supported kind. With load_format "dummy": random values
    for the config.json in this folder; weights in it are ignored."""
    if load_format == "dummy":
        if not path.is_dir():
            raise ModelNotFoundError(
                f"{path}: not a folder; load_format dummy needs a folder with a config.json.",
                "Give such a folder, or set load_format to auto.",
            )
        return DummyFolder.open(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"{path}: can't be opened: {reason}.", _ACCEPTED) from error
    if stat.S_ISDIR(mode):
        return _open_folder(path)
    if path.suffix.lower() == ".gguf":
        return GgufFile.open(path)
    file = MappedFile.open(path)
    head = file.head()
    file.close()
    if head.startswith(MAGIC):  # blobs in caches have no suffix
        return GgufFile.open(path)
    if path.suffix == ".safetensors":
        raise WeightsError(
            f"{path}: a single safetensors file; its config.json is needed too.",
            f"Give its folder instead: {path.parent}",
        )
    raise WeightsError(f"{path}: not a model file: {describe_content(head)}.", _ACCEPTED)


def _open_folder(folder: Path) -> GgufFile | SafetensorsFolder:
    ggufs = sorted(folder.glob("*.gguf"))
    whole = (folder / "config.json").exists() and any(folder.glob("*.safetensors*"))
    if whole or not ggufs:
        return SafetensorsFolder.open(folder)
    if len(ggufs) > 1:
        names = ", ".join(file.name for file in ggufs[:4]) + (", ..." if len(ggufs) > 4 else "")
        raise WeightsError(
            f"{folder}: {len(ggufs)} GGUF files ({names}); expected one.", "Give one of the files."
        )
    return GgufFile.open(ggufs[0])


def find_weights(refs: DecoderWeights[WeightRef], file: WeightsFile) -> DecoderWeights[Weight]:
    """Every tensor that the references name, with its shape checked.

    Equal references return the same object, so that a backend prepares tied weights once.
    """
    found: dict[WeightRef, Weight] = {}
    method = read_method(file.config) if isinstance(file, SafetensorsFolder) else None

    def find_part(role: str, ref: TensorRef, offset: float = 0.0) -> Part:
        if isinstance(file, DummyFolder):
            return dummy_tensor(ref, offset)
        if method is not None and isinstance(file, SafetensorsFolder):
            return _find_quantized(role, ref, file, method) or _find_tensor(role, ref, file)
        return _find_tensor(role, ref, file)

    def find(role: str, ref: WeightRef) -> Weight:
        if ref not in found:
            found[ref] = Weight(
                parts=tuple(find_part(role, part, ref.offset) for part in ref.parts),
                bias=tuple(find_part(f"{role} bias", part) for part in ref.bias),
                offset=ref.offset,
            )
        return found[ref]

    return refs.map(find)


def _find_quantized(
    role: str, ref: TensorRef, file: SafetensorsFolder, method: Method
) -> Part | None:
    part = method.find(role, ref, file)
    if part is not None and role == "embed":
        raise UnsupportedModelError(
            f"{file.path}: tensor {shown(ref.name)} (embed): type {part.format.name}; supported "
            f"are {', '.join(FLOAT_DTYPES)} for the embedding.",
            "Use a copy of the model whose embedding is not quantized.",
        )
    return part


def _find_tensor(role: str, ref: TensorRef, file: WeightsFile) -> Tensor:
    tensor = file.tensors.get(ref.name)
    if tensor is None:
        raise _not_found(role, ref, file)
    if tensor.shape != ref.shape:
        raise WeightsError(
            f"{file.path}: tensor {shown(ref.name)} ({role}): shape: found {list(tensor.shape)}; "
            f"expected {list(ref.shape)}.",
            OTHER_MODEL,
        )
    return tensor


def _not_found(
    role: str, ref: TensorRef, file: WeightsFile
) -> WeightsError | UnsupportedModelError:
    module = ref.name.rpartition(".")[0] + "."
    # AWQ and GPTQ keep "x.qweight" of integers where others have "x.weight".
    for name in (ref.name, module + "qweight"):
        if name in file.left_out:
            supported = FORMATS if isinstance(file, GgufFile) else FLOAT_DTYPES
            return UnsupportedModelError(
                f"{file.path}: tensor {shown(name)} ({role}): type {shown(file.left_out[name])}; "
                f"supported are {', '.join(supported)}.",
                "Use a copy of the model in one of these types.",
            )
    near = difflib.get_close_matches(ref.name, file.tensors, n=3)
    hint = f"similar names: {', '.join(map(shown, near))}" if near else "no name is similar"
    return WeightsError(
        f"{file.path}: no tensor {shown(ref.name)} ({role}, shape {list(ref.shape)}); {hint}.",
        "The file is incomplete or has another architecture than it says: use another copy.",
    )
