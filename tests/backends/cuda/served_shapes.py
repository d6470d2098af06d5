"""Models that kernels are compiled for: their shapes, how each is served, which steps it computes.

Every precision with a model of 8B parameters and with the default model, whose shapes choose other
launches; and from other families what these two do not have: windows, soft caps, biases, norms of
heads one by one and together, heads of other sizes. Numbers alone: nothing is compiled here, and
no weight has memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.backends.cuda.products.choice import MEASURED_ROWS
from headrace.backends.cuda.products.formats import MatrixFormat
from headrace.backends.cuda.products.matrix import Matrix, int4_matrix, quantize_matrix
from headrace.backends.cuda.program import Prepared

META = torch.device("meta")
_LLAMA: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,  # the others would be launched alike
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_SMALL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
MODELS = {
    "llama-3.1-8b": _LLAMA,
    "smollm2-135m": _LLAMA | _SMALL,
    "qwen2.5-7b": _LLAMA
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-0.6b": _LLAMA
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "phi-3-mini": _LLAMA
    | {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
    },
    "phi-4-mini": _LLAMA
    | {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "partial_rotary_factor": 0.75,
        "tie_word_embeddings": True,
    },
    "gemma-2-9b": _LLAMA
    | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "num_attention_heads": 16,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "olmo-2-7b": _LLAMA
    | {
        "model_type": "olmo2",
        "architectures": ["Olmo2ForCausalLM"],
        "vocab_size": 100352,
        "intermediate_size": 11008,
        "num_key_value_heads": 32,
    },
}
Shapes = list[tuple[int, int]]  # (tokens of the longest chunk, rows of the step)
# Steps of one token a sequence, of as many rows as choices are made for; and chunks, for every tile
# that attention has. Where less is asked for, what is between takes no more than what is there.
DECODES: Shapes = [(1, rows) for rows in MEASURED_ROWS]
CHUNKS: Shapes = [(tokens, 1024) for tokens in (1, 8, 16, 32, 1024)]
SOME: Shapes = [(1, 1), (1, 16), (1, 64), (1024, 1024)]
ENDS: Shapes = [(1, 1), (1024, 1024)]
ONE: Shapes = [(1, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model as it is served, and the steps that it is to compute."""

    model: str
    quantization: str = "none"
    kv_dtype: str = "bf16"
    shapes: Shapes
    heads: bool = False
    change: Callable[[str, Prepared], Prepared] | None = None  # to the weights, as loaded
    scales: torch.dtype = torch.float16  # of INT4, as a checkpoint has them

    @property
    def needs_fp8(self) -> bool:
        return "fp8" in (self.quantization, self.kv_dtype) or self.change is fp8_blocks

    def __str__(self) -> str:
        weights = self.quantization if self.change is None else self.change.__name__
        return f"{self.model}, weights {weights}, keys and values {self.kv_dtype}"


def fp8_blocks(role: str, weight: Prepared) -> Prepared:
    """As a checkpoint with a scale for each 128 x 128."""
    if not isinstance(weight, Matrix) or role == "head":
        return weight
    values = torch.empty((weight.rows, weight.columns), device=META)
    return quantize_matrix(values, META, MatrixFormat.FP8_BLOCK, gated=weight.gated)


def gptq(role: str, weight: Prepared) -> Prepared:
    """As a checkpoint with groups of 32 that takes its inputs in another order; one matrix, as the
    others differ in numbers alone."""
    if not isinstance(weight, Matrix) or role != "down":
        return weight
    shape = (weight.rows, weight.columns)
    return int4_matrix(
        torch.empty(shape, dtype=torch.uint8, device=META),
        torch.empty((weight.rows, weight.columns // 32), device=META),
        META,
        permutation=torch.empty(weight.columns, dtype=torch.int32, device=META),
        gated=weight.gated,
    )


# A model's are run in one process, which finds again what they share. The longest come first.
SERVED = (
    Served(model="llama-3.1-8b", shapes=DECODES + CHUNKS, heads=True),
    Served(model="llama-3.1-8b", quantization="int8", shapes=DECODES + ENDS),
    Served(model="llama-3.1-8b", quantization="int4", shapes=DECODES + ENDS),
    Served(model="llama-3.1-8b", quantization="fp8", shapes=DECODES + ENDS),
    Served(model="llama-3.1-8b", kv_dtype="fp8", shapes=[*ENDS, (16, 1024)]),
    Served(model="llama-3.1-8b", kv_dtype="f16", shapes=ONE),
    Served(model="llama-3.1-8b", shapes=SOME, change=fp8_blocks),
    Served(model="llama-3.1-8b", shapes=ONE, change=gptq, scales=torch.bfloat16),
    Served(model="llama-3.1-8b", shapes=ENDS, change=gptq, scales=torch.float32),
    Served(model="smollm2-135m", shapes=SOME, heads=True),
    Served(model="smollm2-135m", quantization="int4", shapes=[*ENDS, (1, 256)]),
    Served(model="smollm2-135m", quantization="int8", shapes=SOME),
    Served(model="smollm2-135m", quantization="fp8", shapes=SOME),
    Served(model="gemma-2-9b", shapes=[*ENDS, (1, 64)], heads=True),
    Served(model="gemma-2-9b", kv_dtype="fp8", shapes=[(1024, 1024)]),
    Served(model="qwen3-0.6b", shapes=DECODES, heads=True),
    Served(model="qwen2.5-7b", shapes=ONE),
    Served(model="phi-3-mini", shapes=ENDS),
    Served(model="phi-4-mini", shapes=ONE),
    Served(model="olmo-2-7b", shapes=[*ENDS, (1, 64)]),
)
