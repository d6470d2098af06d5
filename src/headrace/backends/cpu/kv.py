"""The types in which this backend can store keys and values, and the bytes per token of each.

Plain numbers that mirror the native pool (kernels/kernels.h, kv_head_bytes): the ledger needs them
before a pool exists. Knows nothing of blocks in use.
"""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.models.spec import ModelSpec

DEFAULT_KV_DTYPE = "f16"

_VALUE_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "int8": 1}
_SCALE_BYTES = {"int8": 4}  # one float for each head's key and each head's value of a token

KV_DTYPES = tuple(_VALUE_BYTES)


def check_kv_dtype(kv_dtype: str) -> None:
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_dtype is {str(kv_dtype)!r}; the CPU backend supports {', '.join(KV_DTYPES)}.",
            "Choose one of them: int8 takes the least memory.",
            param="kv_dtype",
        )


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Bytes of the KV pool per token: keys and values of all layers, scales included."""
    check_kv_dtype(kv_dtype)
    value_bytes, scale_bytes = _VALUE_BYTES[kv_dtype], _SCALE_BYTES.get(kv_dtype, 0)
    return sum(2 * a.kv_heads * (a.head_dim * value_bytes + scale_bytes) for a in spec.attention)
