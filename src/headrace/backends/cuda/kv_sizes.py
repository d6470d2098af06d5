"""The types in which keys and values are stored on the device, and the bytes per token of each.

Numbers only: kv.py makes the pool. Knows nothing of blocks in use.
"""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.models.spec import ModelSpec

DEFAULT_KV_DTYPE = "bf16"
KV_VALUE_BYTES = {"bf16": 2, "f16": 2, "fp8": 1, "f32": 4}


def check_kv_dtype(kv_dtype: str) -> None:
    if kv_dtype not in KV_VALUE_BYTES:
        raise ConfigError(
            f"kv_dtype is {str(kv_dtype)!r}; the CUDA backend supports "
            f"{', '.join(KV_VALUE_BYTES)}.",
            "Choose one of them: fp8 takes the least memory.",
            param="kv_dtype",
        )


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    check_kv_dtype(kv_dtype)
    return spec.kv_bytes_per_token(KV_VALUE_BYTES[kv_dtype])
