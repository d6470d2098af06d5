"""Keys and values on the device: one tensor per layer, in blocks, and the bytes per token.

A layer is [2 (keys, values), total_blocks, kv_heads, block_tokens, head_dim]. Knows nothing of
which blocks are in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.core.errors import ConfigError
from headrace.models.spec import ModelSpec

DEFAULT_KV_DTYPE = "bf16"
_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "f32": torch.float32,
}


def check_kv_dtype(kv_dtype: str) -> None:
    if kv_dtype not in _DTYPES:
        raise ConfigError(
            f"kv_dtype is {str(kv_dtype)!r}; the CUDA backend supports {', '.join(_DTYPES)}.",
            "Choose one of them: fp8 takes the least memory.",
            param="kv_dtype",
        )


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    check_kv_dtype(kv_dtype)
    return spec.kv_bytes_per_token(_DTYPES[kv_dtype].itemsize)


class KvPool:
    def __init__(
        self,
        spec: ModelSpec,
        total_blocks: int,
        block_tokens: int,
        kv_dtype: str,
        device: torch.device,
    ) -> None:
        check_kv_dtype(kv_dtype)
        # Zeros: unwritten rows of a block are multiplied by weights of 0, so they must not be NaN.
        self.layers = [
            torch.zeros(
                (2, total_blocks, a.kv_heads, block_tokens, a.head_dim),
                dtype=_DTYPES[kv_dtype],
                device=device,
            )
            for a in spec.attention
        ]
        self._total_blocks = total_blocks

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), one after the other."""
        for source, target in pairs:
            for layer in self.layers:
                # As bytes: not every torch version can copy fp8 by index.
                raw = layer.view(torch.uint8)
                raw[:, target].copy_(raw[:, source])
