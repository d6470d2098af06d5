"""`Deployment`: how a model is served, in words that hold for every engine.

None means that nothing was said, and the engine decides. Knows no flag: read.py makes one from a
command line, write.py makes a command line from one.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.foreign.speculation import Speculation

__all__ = ["Deployment", "Speculation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Types are named as models/precision.py names them: bf16, fp16, fp32, fp8, int8, int4, awq,
    gptq, nvfp4, mxfp4; those of keys and values as `--kv-dtype` does, with GGUF's beside them. A
    word that only one engine has is kept as that engine writes it."""

    model: str | None = None  # a hub id, a folder or a file; None: the command does not say
    revision: str | None = None  # of a hub id
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    context_tokens: int | None = None  # prompt and answer of one sequence together
    max_sequences: int | None = None  # computed at one time
    max_batch_tokens: int | None = None  # computed in one step
    quantization: str | None = None  # None: as the checkpoint is
    dtype: str | None = None  # of activations, and of weights that are not quantized
    kv_dtype: str | None = None
    # Memory of a GPU; more than one of these may be said.
    gpu_memory: float | None = None  # the share of the whole GPU that all of it may take
    gpu_memory_bytes: int | None = None  # the same in bytes
    static_memory: float | None = None  # the share that weights and KV pool may take (SGLang)
    kv_fraction: float | None = None  # the KV pool, as a share of what the weights leave
    kv_memory: int | None = None  # the KV pool in bytes
    kv_tokens: int | None = None  # the KV pool in tokens
    gpu_layers: int | None = None  # the layers that are on the GPU; None: as many as there is room
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    eager: bool | None = None  # True: without CUDA graphs
    speculation: Speculation | None = None
    load_format: str | None = None  # "dummy": random weights
    served_model_name: str | None = None
    host: str | None = None
    port: int | None = None

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor_parallel * self.pipeline_parallel
