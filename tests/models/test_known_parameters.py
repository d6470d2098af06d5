"""Parameters of every family against those of the model that transformers builds from the same
fields, in full size on torch's meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headrace.models.known import all_known

# What transformers calls them; None: it has no such decoder.
_TYPES: dict[str, str | None] = {
    "deepseek_ref": "deepseek_v4",
    "kimi_k2": "deepseek_v3",
    "kimi_k3": None,
    "mimo": None,
    "minimax_m3": "minimax_m3_vl_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "nemotron-nas": None,
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "step3p7": None,
}
_INNER = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "kimi_k2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# One name per file of numbers: the others share it.
_CASES = sorted({known.config_id: known for known in all_known()}.values(), key=lambda k: k.id)


def _config(fields: dict[str, Any]) -> Any:
    inner = fields.get("text_config")
    kind = fields["model_type"]
    if inner is not None:
        kind = inner.get("model_type") or _INNER.get(kind, kind)
        fields = {**{k: v for k, v in fields.items() if k == "tie_word_embeddings"}, **inner}
    kind = _TYPES.get(kind, kind)
    if kind is None:
        pytest.skip("transformers has no decoder of this type")
    return CONFIG_MAPPING[kind].from_dict({**fields, "model_type": kind})


@pytest.mark.parametrize("known", _CASES, ids=lambda known: known.id)
def test_as_many_as_transformers_builds(known: Any) -> None:
    config = _config(dict(known.config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = {id(value): value.numel() for value in model.parameters()}
    assert known.spec.parameters == sum(built.values())
