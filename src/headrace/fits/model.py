"""MODEL of `headrace fit` and its like, as numbers: a file, a folder, a bare config.json, a catalog
name, a hub id or a public model's name. Reads headers only and fetches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import HeadraceError, ModelNotFoundError, OfflineError
from headrace.fetch import hub
from headrace.fetch.catalog import find_entry
from headrace.fetch.resolve import name_model, resolve_model
from headrace.models.config_spec import spec_of_config
from headrace.models.decoder import DecoderWeights
from headrace.models.known import find_known
from headrace.models.spec import ModelSpec
from headrace.weights.describe import describe_file
from headrace.weights.files.json_file import read_object
from headrace.weights.load import find_weights, open_weights
from headrace.weights.weight import Weight

# quant_method of a config.json -> a precision's name.
_METHODS = {"awq": "awq", "gptq": "gptq", "mxfp4": "mxfp4", "fp8": "fp8", "compressed-tensors": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model as numbers, and where they are from."""

    name: str
    spec: ModelSpec
    precision: str  # of its checkpoint; "file": each tensor as it is stored
    source: str
    weights: DecoderWeights[Weight] | None = None  # shapes and formats of a file's own tensors
    stored_bytes: int | None = None  # of all tensors in the file


def find_model(name: str) -> FoundModel:
    """Local files first, then the catalog, then public models by name; a hub id that is neither
    cached nor known is refused, since nothing is fetched."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return _from_config(path, read_object(path))
    if path.is_dir() and (path / "config.json").is_file() and not _has_weights(path):
        return _from_config(path, read_object(path / "config.json"))
    if path.exists() or find_entry(name) is not None:
        try:
            return _from_file(resolve_model(name, offline=True), name)
        except OfflineError:
            return known_model(name)
    try:
        return known_model(name)
    except HeadraceError as unknown:
        return _from_cache(name, unknown)


def _from_cache(name: str, unknown: HeadraceError) -> FoundModel:
    """A hub id whose files are in the cache, or an error that says what was looked for."""
    if hub.parse_hub_id(name) is None:
        raise unknown
    try:
        return _from_file(resolve_model(name, offline=True), name)
    except OfflineError:
        near = unknown.cause.partition("; near it: ")[2].rstrip(".")
        raise ModelNotFoundError(
            f"{name} is not in the cache and nothing is fetched here; it is not a model that "
            f"Headrace knows by name either{f': near it are {near}' if near else ''}.",
            "Run `headrace models pull` with a network, or give its config.json.",
        ) from None


def known_model(name: str) -> FoundModel:
    """One of the public models, without a look at any file."""
    known = find_known(name)
    return FoundModel(
        name=known.id,
        spec=known.spec,
        precision=known.precision,
        source=f"known by name ({known.source})",
    )


def _from_config(path: Path, config: Mapping[str, object]) -> FoundModel:
    spec = spec_of_config(config, str(path))
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    precision = _METHODS.get(str(method), "") if method else "bf16"
    shown = path.parent.name if path.name == "config.json" else path.name
    return FoundModel(
        name=shown if path.is_file() else path.name,
        spec=spec,
        precision=precision or "bf16",
        source=f"{path}, without weights",
    )


def _from_file(path: Path, typed: str) -> FoundModel:
    file = open_weights(path)
    try:
        spec, refs = describe_file(file)
        weights = find_weights(refs, file)
        stored = sum(tensor.data.nbytes for tensor in file.stored.values())
    finally:
        file.close()
    return FoundModel(
        name=name_model(path, typed),
        spec=spec,
        precision="file",
        source=str(path),
        weights=weights,
        stored_bytes=stored,
    )


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))
