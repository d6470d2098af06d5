"""From a model's own description to a ModelSpec and its weights' names: the families by name.

The one entry to the families. Opens no files: it is given config.json or GGUF metadata as values,
and the names of the tensors that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.models.decoder import DecoderWeights
from headrace.models.dims import MAX_CONTEXT
from headrace.models.families import (
    gemma,
    gguf_names,
    hub_names,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    smollm,
)
from headrace.models.families.hub_names import HubNames
from headrace.models.fields import Fields
from headrace.models.refs import WeightRef
from headrace.models.spec import ModelSpec

Description = tuple[ModelSpec, DecoderWeights[WeightRef]]

CONFIG_FAMILIES: dict[str, Callable[[Fields, HubNames, int | None], Description]] = {
    "llama": llama.from_config,
    "mistral": mistral.from_config,
    "qwen2": qwen.from_config,
    "qwen3": qwen.from_config,
    "phi3": phi.from_config,
    "gemma2": gemma.from_config,
    "gemma3_text": gemma.from_config,
    "smollm3": smollm.from_config,
    "olmo2": olmo.from_config,
}

GGUF_FAMILIES: dict[
    str,
    Callable[
        [Fields, Mapping[str, tuple[int, ...]], Sequence[float] | None, int | None], Description
    ],
] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.from_gguf,
    "qwen3": qwen.from_gguf,
    "phi3": phi.from_gguf,
    "gemma2": gemma.from_gguf,
    "gemma3": gemma.from_gguf,
    "smollm3": smollm.from_gguf,
    "olmo2": olmo.from_gguf,
}

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def describe_config(
    config: Mapping[str, object],
    tensor_names: Collection[str],
    context_tokens: int | None = None,
) -> Description:
    """The model that a hub folder's config.json describes, to be served up to `context_tokens`. The
    names are those of all tensors, including those of a type that can't be read."""
    outer = Fields(config, "config.json")
    fields = outer
    kind = outer.text("model_type")
    if kind == "gemma3":  # a multimodal model: its text half is a decoder we know
        inner = outer.section("text_config")
        if inner is None:
            raise outer.malformed("text_config", "an object")
        fields = inner.with_value("model_type", "gemma3_text")
        kind = "gemma3_text"
    if kind not in CONFIG_FAMILIES:
        supported = ", ".join([*CONFIG_FAMILIES, "gemma3"])
        raise outer.unsupported("model_type", supported)
    for section in (outer, fields):
        _refuse_features(section)
    names = hub_names.find_names(tensor_names)
    spec, weights = CONFIG_FAMILIES[kind](fields, names, context_tokens)
    hub_names.refuse_unread(weights, names, tensor_names)
    return spec, weights


def describe_gguf(
    metadata: Mapping[str, object],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    rope_factors: Sequence[float] | None = None,
    context_tokens: int | None = None,
) -> Description:
    """The model that a GGUF file describes.

    Shapes are outermost first, and of all tensors: those of a type that can't be read must be
    included (as `()`), or an unreadable output layer would be taken for a tied one. `rope_factors`
    are the values of the tensor that `rope_factors_name` names, if any.
    """
    architecture = _architecture(metadata)
    fields = gguf_names.gguf_fields(metadata, architecture)
    needed = rope_factors_name(metadata, tensor_shapes, context_tokens)
    if (needed is None) != (rope_factors is None):
        given = "none" if rope_factors is None else f"{len(rope_factors)}"
        raise WeightsError(
            f"{given} rotary factors given; expected the values of the tensor {needed}.",
            "Read the tensor that rope_factors_name names.",
            param="rope_factors",
        )
    spec, weights = GGUF_FAMILIES[architecture](fields, tensor_shapes, rope_factors, context_tokens)
    gguf_names.refuse_unread(weights, tensor_shapes)
    return spec, weights


def rope_factors_name(
    metadata: Mapping[str, object],
    tensor_names: Collection[str],
    context_tokens: int | None = None,
) -> str | None:
    """The tensor of a GGUF file with the rotary factors for `describe_gguf`; None if the file has
    none. LongRoPE has two, chosen by the context to be served."""
    if gguf_names.ROPE_FREQS in tensor_names:
        return gguf_names.ROPE_FREQS
    if gguf_names.ROPE_FACTORS_LONG not in tensor_names:
        return None
    fields = gguf_names.gguf_fields(metadata, _architecture(metadata))
    longest = fields.integer("context_length", high=MAX_CONTEXT)
    original = fields.integer(
        "rope.scaling.original_context_length", high=MAX_CONTEXT, default=longest
    )
    served = longest if context_tokens is None else context_tokens
    if served > original:
        return gguf_names.ROPE_FACTORS_LONG
    return gguf_names.ROPE_FACTORS_SHORT


def _architecture(metadata: Mapping[str, object]) -> str:
    fields = Fields(metadata, "GGUF metadata")
    architecture = fields.text("general.architecture")
    if architecture not in GGUF_FAMILIES:
        raise fields.unsupported("general.architecture", ", ".join(GGUF_FAMILIES))
    return architecture


def _refuse_features(config: Fields) -> None:
    """Refuse features that no family supports."""
    if config.has("quantization_config"):
        raise config.unsupported("quantization_config", "F32, F16 and BF16 safetensors, or GGUF")
    for name in _EXPERTS:
        if config.has(name) and config.integer(name, low=0) > 0:
            raise config.unsupported(name, "dense models")
    if not config.has("architectures"):
        return
    for name in config.texts("architectures"):
        if not name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise UnsupportedModelError(
                f"{config.where}: architectures holds {name}; supported: …ForCausalLM.",
                "Choose a model that generates text.",
                param="architectures",
            )
