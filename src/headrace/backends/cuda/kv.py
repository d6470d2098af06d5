"""Keys and values on the device: one tensor per layer, in blocks.

A layer is [2 (keys, values), total_blocks, kv_heads, block_tokens, head_dim]. Knows nothing of
which blocks are in use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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

    @property
    def block_bytes(self) -> int:
        return self.nbytes // self._total_blocks

    @property
    def layout(self) -> str:
        """A block's bytes lie layer by layer, [2, kv_heads, block_tokens, head_dim] each."""
        shapes = (f"{a.shape[2]}x{a.shape[4]}" for a in self.layers)
        kind, tokens = str(self.layers[0].dtype).removeprefix("torch."), self.layers[0].shape[3]
        return f"cuda {kind} {','.join(shapes)} by {tokens}"

    def gather(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies of whole blocks, on the device: [n, block_bytes]."""
        parts = []
        for layer in self._raw():
            parts.append(layer[:, blocks].transpose(0, 1).reshape(len(blocks), -1))
        return torch.cat(parts, dim=1)

    def scatter(self, blocks: torch.Tensor, contents: torch.Tensor) -> None:
        """The reverse."""
        at = 0
        for layer in self._raw():
            width = 2 * layer.shape[2]
            part = contents[:, at : at + width].reshape(len(blocks), 2, -1)
            layer[:, blocks] = part.transpose(0, 1)
            at += width

    def _raw(self) -> Iterator[torch.Tensor]:
        """Each layer's bytes: [2, total_blocks, bytes]. Not every torch version can copy fp8 by
        index."""
        for layer in self.layers:
            yield layer.view(torch.uint8).reshape(2, self._total_blocks, -1)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks, (from, to), one after the other."""
        for source, target in pairs:
            for layer in self.layers:
                # As bytes: not every torch version can copy fp8 by index.
                raw = layer.view(torch.uint8)
                raw[:, target].copy_(raw[:, source])
