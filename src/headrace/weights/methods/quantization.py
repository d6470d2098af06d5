"""From config.json's quantization_config to the method that reads such a checkpoint.

The one entry to the methods. Knows their names, but not how they lay their tensors out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.models.fields import Fields
from headrace.weights.methods.awq import AwqMethod
from headrace.weights.methods.fp8 import EightBitMethod
from headrace.weights.methods.gptq import GptqMethod
from headrace.weights.methods.quantized import Method

FIELD = "quantization_config"

METHODS: dict[str, Callable[[Fields], Method]] = {
    "awq": AwqMethod.from_config,
    "gptq": GptqMethod.from_config,
    "fp8": EightBitMethod.from_config,
    "fbgemm_fp8": EightBitMethod.from_config,
    "compressed-tensors": EightBitMethod.from_compressed,
}


def read_method(config: Mapping[str, object]) -> Method | None:
    """How the checkpoint of this config is quantized; None: it is not."""
    fields = Fields(config, "config.json").section(FIELD)
    if fields is None:
        return None
    name = fields.text("quant_method")
    if name not in METHODS:
        raise fields.unsupported("quant_method", ", ".join(METHODS))
    return METHODS[name](fields)
