"""Rotary frequencies against transformers' own functions, on the figures of real models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace.core.errors import UnsupportedModelError, WeightsError
from headrace.models.fields import Fields
from headrace.models.rope import RopeShape, rope_from_config, rope_from_gguf, rope_section

LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
DEEPSEEK_YARN = QWEN_YARN | {
    "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1, "beta_fast": 24, "beta_slow": 2,
}  # fmt: skip
PHI35 = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.02 * i for i in range(48)],
    "long_factor": [1.08 + 1.3 * i for i in range(48)],
    "original_max_position_embeddings": 4096,
}


def shape_of(section: dict[str, Any], dim: int, longest: int, served: int) -> RopeShape:
    return RopeShape(
        base=section["rope_theta"],
        rotary_dim=dim,
        original_tokens=section.get("original_max_position_embeddings", longest),
        longest_tokens=longest,
        served_tokens=served,
    )


@pytest.mark.parametrize(
    ("section", "head_dim", "served"),
    [
        (LLAMA31, 128, 131_072),
        ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 256, 131_072),
        (QWEN_YARN, 128, 131_072),
        (QWEN_YARN | {"attention_factor": 1.25}, 64, 131_072),
        (QWEN_YARN | {"truncate": False}, 128, 131_072),
        (DEEPSEEK_YARN, 64, 131_072),
        (PHI35, 96, 4096),
        (PHI35, 96, 131_072),
    ],
)
def test_frequencies_are_those_of_transformers(
    section: dict[str, Any], head_dim: int, served: int
) -> None:
    maker: type[PreTrainedConfig] = Phi3Config if section is PHI35 else LlamaConfig
    config = maker(
        hidden_size=32 * head_dim, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=131_072, rope_parameters=dict(section),
    )  # fmt: skip
    wanted, scale = ROPE_INIT_FUNCTIONS[section["rope_type"]](config, "cpu", seq_len=served)
    found = rope_from_config(
        Fields(section, "config.json"), shape_of(section, head_dim, 131_072, served)
    )
    np.testing.assert_allclose(found.inv_freq, wanted.numpy(), rtol=1e-6)
    assert found.scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "mrope", "proportional", "axial"])
def test_other_scalings_are_refused_by_name(kind: str) -> None:
    config = Fields({"rope_scaling": {"type": kind, "factor": 2.0}}, "config.json")
    with pytest.raises(UnsupportedModelError, match=rf"rope_scaling\.type is '{kind}'.*llama3"):
        rope_from_config(rope_section(config), shape_of({"rope_theta": 1e4}, 64, 100, 100))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"factor": 0}, "factor"),
        ({"factor": "8"}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"factor": None}, "factor"),
        ({"high_freq_factor": 1.0}, "high_freq_factor"),
        ({"low_freq_factor": -1}, "low_freq_factor"),
    ],
)
def test_malformed_scalings_name_the_field(change: dict[str, object], field: str) -> None:
    section = Fields(LLAMA31 | change, "config.json", "rope_scaling.")
    with pytest.raises(WeightsError, match=rf"rope_scaling\.{field} is .*; expected"):
        rope_from_config(section, shape_of(LLAMA31, 128, 131_072, 131_072))


@pytest.mark.parametrize("factors", [[1.0] * 47, [1.0] * 47 + [0.0], [1.0] * 47 + ["x"], "long"])
def test_longrope_factors_are_checked(factors: object) -> None:
    section = Fields(PHI35 | {"long_factor": factors}, "config.json")
    with pytest.raises(WeightsError, match="long_factor"):
        rope_from_config(section, shape_of(PHI35, 96, 131_072, 131_072))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type"),
        ({"rope.scaling.type": "linear"}, "rope.scaling.factor is missing"),
        ({"rope.scaling.type": "longrope"}, "rope factors tensors"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1}, "log_multiplier"),
    ],
)
def test_gguf_scalings_are_checked(metadata: dict[str, object], message: str) -> None:
    shape = shape_of({"rope_theta": 1e4}, 64, 100, 100)
    with pytest.raises((UnsupportedModelError, WeightsError), match=message):
        rope_from_gguf(Fields(metadata, "GGUF metadata", "llama."), shape, None)


def test_gguf_factors_divide() -> None:
    shape = shape_of({"rope_theta": 1e4}, 4, 100, 100)
    empty = Fields({}, "GGUF metadata", "llama.")
    found = rope_from_gguf(empty, shape, [1.0, 4.0], interleaved=True)
    assert found.inv_freq == pytest.approx((1.0, 0.0025))
    with pytest.raises(WeightsError, match="has 3 values; expected 2"):
        rope_from_gguf(empty, shape, [1.0, 4.0, 2.0])
