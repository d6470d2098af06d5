"""A ModelSpec from a bare config.json, for counting: of every family that is served, and of those
that are only counted.

Takes values, opens no file, and asks for no weights. registry.py is the way to a served model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from headrace.core.errors import WeightsError
from headrace.models.counted import heads, latent, recurrent
from headrace.models.counted.stack import left_out
from headrace.models.families.hub_names import HubNames
from headrace.models.fields import Fields
from headrace.models.registry import CONFIG_FAMILIES
from headrace.models.spec import ModelSpec

COUNTED_FAMILIES: dict[str, Callable[[Fields, Fields | None], ModelSpec]] = {
    "deepseek_ref": latent.deepseek_v4,
    "deepseek_v2": latent.deepseek,
    "deepseek_v3": latent.deepseek,
    "deepseek_v32": latent.deepseek,
    "deepseek_v4": latent.deepseek_v4,
    "gemma4_text": heads.gemma4,
    "glm4_moe": heads.glm4_moe,
    "glm_moe_dsa": latent.deepseek,
    "gpt_oss": heads.gpt_oss,
    "kimi_k2": latent.deepseek,
    "kimi_linear": recurrent.kimi_linear,
    "mimo": heads.mimo,
    "mimo_v2_flash": heads.mimo_v2_flash,
    "minimax_m2": heads.minimax_m2,
    "minimax_m3": heads.minimax_m3,
    "mixtral": heads.mixtral,
    "nemotron-nas": heads.nemotron_nas,
    "nemotron_h": recurrent.nemotron_h,
    "qwen2_moe": heads.qwen_moe,
    "qwen3_5_moe_text": recurrent.qwen3_next,
    "qwen3_5_text": recurrent.qwen3_next,
    "qwen3_moe": heads.qwen_moe,
    "qwen3_next": recurrent.qwen3_next,
    "qwen3_vl_moe_text": heads.qwen_moe,
    "qwen3_vl_text": heads.qwen3_vl,
    "step3p5": heads.step3,
    "step3p7": heads.step3,
}

# Multimodal files, whose decoder is described in a section of its own: its type where that section
# does not say.
_WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "kimi_k3": "kimi_linear",
    "minimax_m3_vl": "minimax_m3",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}


def spec_of_config(config: Mapping[str, object], where: str = "config.json") -> ModelSpec:
    """The decoder that a config.json describes, whether or not the engine can serve it."""
    if not isinstance(config, Mapping):
        raise WeightsError(f"{where} is not an object.", "Give a model's config.json.")
    file = Fields(config, where)
    kind, fields, outer = file.text("model_type"), file, None
    if kind in _WRAPPERS and (file.has("text_config") or kind not in COUNTED_FAMILIES):
        section = file.section("text_config")
        if section is None:
            raise file.malformed("text_config", "an object")
        fields, outer = section, file
        kind = section.text("model_type", default=_WRAPPERS[kind])
        if kind not in COUNTED_FAMILIES and kind not in CONFIG_FAMILIES:
            kind = _WRAPPERS[file.text("model_type")]
        fields = fields.with_value("model_type", kind)
        if not fields.has("tie_word_embeddings") and file.has("tie_word_embeddings"):
            fields = fields.with_value("tie_word_embeddings", file.value("tie_word_embeddings"))
    if kind in COUNTED_FAMILIES:
        return COUNTED_FAMILIES[kind](fields, outer)
    if kind not in CONFIG_FAMILIES:
        known = sorted([*CONFIG_FAMILIES, *COUNTED_FAMILIES, *_WRAPPERS])
        raise file.unsupported("model_type", ", ".join(known))
    spec, _ = CONFIG_FAMILIES[kind](fields, HubNames("model.", "lm_head.weight"), None)
    return spec if outer is None else replace(spec, left_out=left_out(fields, outer))
