"""Which model an open weights file contains: its spec, and the names of its weights.

Connects the file readers with the model families. Loads no weight.
"""

from __future__ import annotations

from headrace.core.errors import UnsupportedModelError
from headrace.models.decoder import DecoderWeights
from headrace.models.refs import WeightRef
from headrace.models.registry import describe_config, describe_gguf, rope_factors_name
from headrace.models.spec import ModelSpec
from headrace.weights.dequantize import dequantize
from headrace.weights.dummy import DummyFolder
from headrace.weights.files.safetensors import SafetensorsFolder
from headrace.weights.load import OpenFile
from headrace.weights.methods.quantization import FIELD, read_method


def describe_file(
    file: OpenFile, context_tokens: int | None = None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    """`context_tokens` is the context to serve: the rope of some models depends on it."""
    if isinstance(file, DummyFolder):
        if file.config.get(FIELD):
            raise UnsupportedModelError(
                f"{file.path}: config.json has a {FIELD}; load_format dummy makes BF16 weights.",
                f"Remove the {FIELD}, and set --quantization to quantize while loading.",
            )
        return describe_config(file.config, [], context_tokens)
    if isinstance(file, SafetensorsFolder):
        return _describe_folder(file, context_tokens)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    shapes.update((name, ()) for name in file.left_out)
    factors = None
    if name := rope_factors_name(file.metadata, shapes, context_tokens):
        if name not in file.tensors:
            raise UnsupportedModelError(
                f"{file.path}: tensor {name!r}: type {file.left_out[name]}; expected F32.",
                "Use another copy of the model.",
            )
        factors = dequantize(file.tensors[name]).reshape(-1).tolist()
    return describe_gguf(file.metadata, shapes, factors, context_tokens)


def _describe_folder(
    file: SafetensorsFolder, context_tokens: int | None
) -> tuple[ModelSpec, DecoderWeights[WeightRef]]:
    """Families see a quantized checkpoint as if it were not quantized."""
    names = [*file.tensors, *file.left_out]
    method = read_method(file.config)
    if method is None:
        return describe_config(file.config, names, context_tokens)
    plain = {name: value for name, value in file.config.items() if name != FIELD}
    return describe_config(plain, method.plain_names(file, names), context_tokens)
