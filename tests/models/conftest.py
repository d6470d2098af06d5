"""Tiny random models, made and saved by transformers: the outside oracle of the families.

Weights are large enough for attention to be sharp, and norms and biases are random too:
transformers starts them at one and zero, which would hide what is done with them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}

CASES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama2": lambda: LlamaConfig(**(_SIZES | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5})),
    "llama3": lambda: LlamaConfig(**_SIZES, head_dim=32, rope_parameters=_LLAMA3),
    "smollm": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "linear": lambda: LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}
    ),
    "yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=8),
    "smollm3": lambda: SmolLM3Config(
        **(_SIZES | {"num_hidden_layers": 5}), rope_parameters=_YARN | {"rope_theta": 5e4}
    ),
    "smollm3_windows": lambda: SmolLM3Config(
        **_SIZES, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=8
    ),
    "olmo2": lambda: Olmo2Config(**_SIZES, rope_parameters={"rope_theta": 5e5}),
    "qwen2": lambda: Qwen2Config(**_SIZES, rope_parameters={"rope_theta": 1e6}),
    "qwen2_windows": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=24, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**_SIZES, sliding_window=12),
    "phi3_longrope": lambda: Phi3Config(
        **_SIZES, original_max_position_embeddings=16, rope_parameters=dict(_LONGROPE)
    ),
    "phi3_partial": lambda: Phi3Config(
        **_SIZES, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "gemma2": lambda: Gemma2Config(
        **_SIZES, **_GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **(_SIZES | {"num_hidden_layers": 7}),
        **_GEMMA,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}


def _randomise(model: torch.nn.Module, gemma: bool) -> None:
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(noise * 0.5)
            elif parameter.ndim == 1:
                parameter.copy_(noise * 0.3 + (0.0 if gemma else 1.0))
            elif "embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 * parameter.shape[1] ** -0.5)


@pytest.fixture(scope="session", params=list(CASES))
def tiny_case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_tiny(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[torch.nn.Module, Path]]:
    """A case's model and the folder it was saved to."""
    torch.set_num_threads(1)
    made: dict[str, tuple[torch.nn.Module, Path]] = {}

    def make(case: str) -> tuple[torch.nn.Module, Path]:
        if case not in made:
            config = CASES[case]()
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", dtype=torch.float32
            ).eval()
            _randomise(model, case.startswith("gemma"))
            folder = tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            made[case] = model, folder
        return made[case]

    return make
