"""Keys and values on the device: one tensor per layer, in blocks.

A layer is [2 (keys, values), total_blocks, kv_heads, block_tokens, head_dim]. Knows nothing of
which blocks are in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.backends.cuda.kv_sizes import check_kv_dtype
from headrace.models.spec import ModelSpec

_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "f32": torch.float32,
}


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
