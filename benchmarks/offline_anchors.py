"""What Headrace's offline figures are held against: vLLM's, the targets, and floors.

vLLM 0.26.0 was measured on one NVIDIA H200 with random weights; FP8 there means weights and KV
cache, INT4 means AWQ. A floor is what that card allows: bytes at the rate at which it reads, or
operations at the rate at which it multiplies, whichever takes longer. Nothing is measured here.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.models.spec import ModelSpec

# Measured on the card: bytes read a second, operations a second of large products.
H200_BYTES_PER_S = 4.57e12
H200_OPERATIONS_PER_S = {"bf16": 680e12, "int4": 680e12, "int8": 1170e12, "fp8": 1170e12}
# Of a matrix; the output layer stays in bf16. INT4 counts its scales and zero points.
_BYTES_PER_VALUE = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625}

_8B, _06B = "llama-3.1-8b", "qwen3-0.6b"

VLLM: dict[tuple[str, str], dict[str, float]] = {
    (_8B, "bf16"): {
        "decode 1": 4.90, "decode 8": 5.00, "decode 32": 5.47, "decode 64": 6.05,
        "decode 128": 6.94, "decode 256": 10.64, "decode 512": 18.93,
        "prefill 512": 17.5, "prefill 2048": 52.3, "prefill 8192": 215, "prefill 16000": 474,
        "long 16 x 8192": 9.15, "long 64 x 4096": 13.3, "mixed": 9933, "throughput": 35506,
        "prefix cold": 103, "prefix warm": 11.6, "start-up": 75,
    },
    (_8B, "fp8"): {
        "decode 1": 3.56, "decode 8": 3.64, "decode 32": 4.64, "decode 64": 4.65,
        "decode 128": 5.86, "decode 256": 9.72, "decode 512": 15.66,
        "prefill 512": 12.6, "prefill 2048": 35.4, "prefill 8192": 146, "prefill 16000": 337,
        "long 16 x 8192": 6.58, "long 64 x 4096": 10.5, "mixed": 12320, "throughput": 53053,
        "prefix cold": 67, "prefix warm": 17, "start-up": 80,
    },
    (_8B, "int4"): {
        "decode 1": 3.98, "decode 8": 4.10, "decode 32": 4.66, "decode 64": 6.15,
        "decode 128": 7.27, "decode 256": 10.65, "decode 512": 17.83,
        "prefill 512": 17.1, "prefill 2048": 50.0, "prefill 8192": 206, "prefill 16000": 443,
        "long 16 x 8192": 8.02, "long 64 x 4096": 13.5, "mixed": 9966, "throughput": 37498,
        "prefix cold": 97, "prefix warm": 19, "start-up": 65,
    },
    (_06B, "bf16"): {
        "decode 1": 1.62, "decode 8": 1.74, "decode 32": 2.56, "decode 64": 2.52,
        "decode 128": 2.83, "decode 256": 4.55, "decode 512": 7.28,
        "prefill 512": 7.3, "prefill 8192": 34.7, "mixed": 23716, "throughput": 144624,
    },
}  # fmt: skip

TARGETS: dict[tuple[str, str], dict[str, float]] = {
    (_8B, "bf16"): {
        "decode 1": 4.0, "decode 8": 4.3, "decode 32": 4.7, "decode 64": 5.2, "decode 128": 6.6,
        "decode 256": 9.6, "decode 512": 17, "prefill 512": 15, "prefill 2048": 48,
        "prefill 8192": 212, "long 16 x 8192": 8.0, "mixed": 11000, "throughput": 38000,
        "prefix warm": 8, "start-up": 45,
    },
    (_8B, "fp8"): {
        "decode 1": 2.4, "decode 8": 2.7, "decode 64": 3.3, "decode 256": 7.5, "start-up": 45,
    },
    (_8B, "int4"): {"decode 1": 2.2, "decode 8": 2.5, "start-up": 45},
    (_06B, "bf16"): {"decode 1": 0.8, "decode 64": 1.4, "decode 256": 3.4},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Floors:
    """For one model at one precision. Times are in seconds."""

    spec: ModelSpec
    precision: str
    kv_value_bytes: int  # 2, or 1 for an fp8 cache

    @property
    def _head_values(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def _matrix_values(self) -> int:
        """Of the layers: what every row of a step is multiplied with."""
        tables = 1 if self.spec.tied_embeddings else 2
        return self.spec.parameters - tables * self._head_values

    @property
    def weight_bytes(self) -> float:
        """Read by every step."""
        return self._matrix_values * _BYTES_PER_VALUE[self.precision] + 2 * self._head_values

    def _operations(self, rows: int, logits: int, attended: float) -> float:
        """`attended`: pairs of a row and a token that it looks at."""
        per_pair = 4 * sum(a.q_width for a in self.spec.attention)
        values = rows * self._matrix_values + logits * self._head_values
        return 2 * values + per_pair * attended

    def step_s(self, sequences: int, context_tokens: float) -> float:
        """One token of each sequence, after so many."""
        kv = sequences * context_tokens * self.spec.kv_bytes_per_token(self.kv_value_bytes)
        operations = self._operations(sequences, sequences, sequences * context_tokens)
        return max(self._read_s(self.weight_bytes + kv), self._multiply_s(operations))

    def prompt_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """From a prompt to its first token, with so many of its tokens in the prefix cache."""
        new = tokens - cached_tokens
        attended = new * (cached_tokens + (new + 1) / 2)
        kv = tokens * self.spec.kv_bytes_per_token(self.kv_value_bytes)
        operations = self._operations(new, 1, attended)
        return max(self._read_s(self.weight_bytes + kv), self._multiply_s(operations))

    def batch_s(self, lengths: list[tuple[int, int]]) -> float:
        """All of (prompt, output) tokens: their operations, and no fewer steps than the longest
        output has tokens."""
        operations = sum(
            self._operations(p + n - 1, n, (p + n) * (p + n - 1) / 2) for p, n in lengths
        )
        steps = max(n for _, n in lengths)
        return max(self._multiply_s(operations), self._read_s(steps * self.weight_bytes))

    def _read_s(self, bytes_read: float) -> float:
        return bytes_read / H200_BYTES_PER_S

    def _multiply_s(self, operations: float) -> float:
        return operations / H200_OPERATIONS_PER_S[self.precision]
