"""Sizes that are computed without torch are those of the runner's own tensors: for models as large
as they are served, its classes are made over tensors with shapes but no memory (torch's "meta").
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from headrace.backends.cuda import layout
from headrace.backends.cuda.attention.plan import attention_windows, work_shape
from headrace.backends.cuda.backend import CudaBackend
from headrace.backends.cuda.draws.sampling import Sampler
from headrace.backends.cuda.kv import KvPool
from headrace.backends.cuda.kv_sizes import kv_bytes_per_token
from headrace.backends.cuda.loading import prepared_bytes
from headrace.backends.cuda.products.formats import VECTORS, MatrixFormat, made_format
from headrace.backends.cuda.products.matrix import dense_matrix, fp8_matrix, quantize_matrix
from headrace.backends.cuda.program import Prepared, Program, Table
from headrace.backends.cuda.step.inputs import StepInputs
from headrace.backends.cuda.step.shapes import logit_rows
from headrace.core.config import EngineConfig, KvDtype, StepSizes
from headrace.core.errors import ConfigError
from headrace.core.step import RunnerLimits
from headrace.models.decoder import DecoderWeights
from headrace.models.refs import WeightRef
from headrace.models.registry import describe_config
from headrace.models.spec import ModelSpec
from headrace.weights.dummy import dummy_tensor
from headrace.weights.weight import Weight, are_tied

META = torch.device("meta")
_ROPE = {"rope_theta": 10000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}


def _config(model_type: str, *sizes: int, **more: object) -> dict[str, object]:
    """Vocabulary, width, MLP, layers, heads, KV heads."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads"]
    kind = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2"}
    kind |= {"mistral": "Mistral", "olmo2": "Olmo2"}
    base = {"model_type": model_type, "architectures": [f"{kind[model_type]}ForCausalLM"]}
    activation = "gelu_pytorch_tanh" if model_type == "gemma2" else "silu"
    base |= {"hidden_act": activation, "hidden_activation": activation}
    return base | _ROPE | dict(zip(names, sizes, strict=True)) | more


MODELS = {
    "llama-3.1-8b": _config("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _config("llama", 128256, 8192, 28672, 80, 64, 8),
    "llama-2-7b": _config("llama", 32000, 4096, 11008, 32, 32, 32),
    "llama-3.2-1b": _config(
        "llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, tie_word_embeddings=True
    ),
    "mistral-7b": _config("mistral", 32000, 4096, 14336, 32, 32, 8, sliding_window=4096),
    "qwen2-7b": _config("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen3-0.6b": _config(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True
    ),
    "qwen3-32b": _config("qwen3", 151936, 5120, 25600, 64, 64, 8, head_dim=128),
    "gemma2-9b": _config(
        "gemma2",
        256000,
        3584,
        14336,
        42,
        16,
        8,
        head_dim=256,
        sliding_window=4096,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    "olmo2-7b": _config("olmo2", 100352, 4096, 11008, 32, 32, 32),
    "smol-135m": _config("llama", 49152, 576, 1536, 30, 9, 3, tie_word_embeddings=True),
}
# max_batch_tokens, max_sequences, block_tokens, context_tokens, multiprocessors
SIZES = [
    (8192, 512, 64, 8192, 132),
    (2048, 64, 32, 131072, 108),
    (64, 8, 16, 1000, 20),
    (300, 700, 64, 32768, 148),
]
QUANTIZED = ("none", "fp8", "int8", "int4")
CASES = [
    (name, QUANTIZED[(number + shift) % 4], *sizes)
    for number, name in enumerate(MODELS)
    for shift, sizes in enumerate(SIZES)
]


def load(name: str) -> tuple[ModelSpec, DecoderWeights[Weight]]:
    spec, refs = describe_config(MODELS[name], [], None)
    made: dict[WeightRef, Weight] = {}

    def find(_role: str, ref: WeightRef) -> Weight:
        if ref not in made:
            parts = tuple(dummy_tensor(part, ref.offset) for part in ref.parts)
            made[ref] = Weight(parts=parts, bias=tuple(map(dummy_tensor, ref.bias)))
        return made[ref]

    return spec, refs.map(find)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_without_torch_it_is_the_same(
    case: tuple[str, str, int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether INT4 scales fit into two bytes depends on values; those that we round to do.
    monkeypatch.setattr(torch, "equal", lambda x, y: True)
    name, quantization, batch, sequences, block, context, processors = case
    spec, weights = load(name)
    config = EngineConfig(max_batch_tokens=batch, max_sequences=sequences, block_tokens=block)
    sizes = config.sizes(CudaBackend.defaults)
    prepared = prepare(weights, quantization)
    shapes = layout.shape_weights(weights, quantization)
    assert layout.weight_bytes(shapes) == prepared_bytes(prepared)
    predicted = layout.activation_bytes(spec, shapes, sizes, processors, batch, context)
    assert predicted == allocated_bytes(spec, prepared, sizes, processors, context)


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_the_pool_is_its_tokens(dtype: KvDtype) -> None:
    spec, _ = load("qwen3-0.6b")
    if dtype is KvDtype.INT8:  # only on a CPU
        with pytest.raises(ConfigError):
            kv_bytes_per_token(spec, dtype)
    else:
        assert KvPool(spec, 3, 16, dtype, META).nbytes == 48 * kv_bytes_per_token(spec, dtype)


def test_it_needs_no_torch() -> None:
    """In a process of its own: torch is imported here."""
    code = "import sys, headrace.backends.cuda.layout; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def prepare(weights: DecoderWeights[Weight], quantization: str) -> DecoderWeights[Prepared]:
    """As `loading.Loader` does, by the functions that make matrices, without values."""
    embed, tied = weights.embed, are_tied(weights.embed, weights.head)
    assert embed is not None
    table = Table(torch.empty(embed.rows, embed.columns, dtype=torch.bfloat16, device=META))

    def change(role: str, weight: Weight) -> Prepared:
        if role == "embed":
            return table
        if role in VECTORS:
            return torch.empty(weight.columns, dtype=torch.float32, device=META)
        if role == "head" and tied:
            return dense_matrix(table.data, META)
        values = torch.empty(weight.rows, weight.columns, dtype=torch.bfloat16, device=META)
        bias = torch.empty(weight.rows, device=META) if weight.bias else None
        gated = role == "gate_up"
        made = made_format(role, weight, quantization, weight is weights.layers[-1].down)
        if made is None:
            return dense_matrix(values, META, bias=bias, gated=gated)
        format, group = made
        if format in (MatrixFormat.FP8, MatrixFormat.FP8_BLOCK):  # rounding to it tries many scales
            codes = values.to(torch.float8_e4m3fn)
            groups = -(-weight.columns // group) if group else 1
            scales = torch.empty(weight.rows, groups, device=META)
            return fp8_matrix(codes, scales, META, group=group, bias=bias, gated=gated)
        return quantize_matrix(values, META, format, group=group, bias=bias, gated=gated)

    return weights.map(change)


def allocated_bytes(
    spec: ModelSpec,
    prepared: DecoderWeights[Prepared],
    sizes: StepSizes,
    multiprocessors: int,
    context: int,
) -> int:
    limits = RunnerLimits(
        max_batch_tokens=sizes.max_batch_tokens,
        max_sequences=sizes.max_sequences,
        total_blocks=1,
        block_tokens=sizes.block_tokens,
        context_tokens=context,
    )
    shape = work_shape(spec, sizes.max_sequences, multiprocessors)
    rows = logit_rows(sizes.max_batch_tokens, sizes.max_sequences)
    inputs = StepInputs(
        limits,
        shape,
        head_dim=spec.attention[0].head_dim,
        windows=attention_windows(spec),
        wanted_rows=rows,
        vocab_size=spec.vocab_size,
        device=META,
    )
    program = Program(
        spec,
        prepared,
        KvPool(spec, 1, sizes.block_tokens, "bf16", META),
        inputs,
        shape,
        max_rows=sizes.max_batch_tokens,
        logit_rows=rows,
        context_tokens=context,
        block_tokens=sizes.block_tokens,
        dtype=torch.bfloat16,
        device=META,
    )
    wanted = sizes.max_batch_tokens + sizes.max_sequences
    sampler = Sampler(rows, wanted, sizes.max_sequences, spec.vocab_size, META)
    return program.nbytes + inputs.nbytes + sampler.nbytes
