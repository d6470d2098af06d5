"""The reference backend as the rest of the program sees it: numpy, everything in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headrace.backends.reference.runner import ReferenceRunner
from headrace.backends.shared import host
from headrace.core.config import Device, EngineConfig, KvDtype, Quantization, StepSizes
from headrace.core.errors import ConfigError
from headrace.core.ranks import Ranks
from headrace.core.step import Runner
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.sizing import Footprint, Sizing
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

FLOAT_BYTES = 4


class ReferenceBackend:
    name = Device.REFERENCE
    defaults = StepSizes(
        max_batch_tokens=512,
        max_sequences=64,
        block_tokens=16,
        kv_dtype=KvDtype.F32,
        overlap=False,
        max_step_growth=2.0,
    )

    def check(self, config: EngineConfig) -> None:
        """Runs everywhere, and in float32 only: it computes what the results of smaller types
        should be close to."""
        if config.kv_dtype not in (None, KvDtype.F32):
            raise ConfigError(
                f"kv_dtype is {config.kv_dtype.value!r}; the reference backend supports only f32.",
                "Leave it out, or set --device cpu or cuda.",
                param="kv_dtype",
            )
        if config.quantization is not Quantization.NONE:
            raise ConfigError(
                f"quantization is {config.quantization.value!r}; the reference backend does not "
                "quantize weights.",
                "Leave it out, or set --device cuda.",
                param="quantization",
            )

    def footprint(
        self, spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
    ) -> Footprint:
        """A rough estimate for a step: the widest rows, and the attention scores of every head."""
        width = 3 * spec.hidden_size + 3 * spec.intermediate_size + 2 * spec.attention[0].qkv_width
        heads = max(a.heads for a in spec.attention)
        available = host.free_bytes(config.memory_share)
        return Footprint(
            spec=spec,
            sizes=config.sizes(self.defaults),
            weight_bytes=FLOAT_BYTES * _values(weights),
            kv_dtype=KvDtype.F32.value,
            kv_bytes_per_token=spec.kv_bytes_per_token(FLOAT_BYTES),
            activation_bytes=lambda tokens, context: (
                FLOAT_BYTES * tokens * (width + heads * context)
            ),
            available_bytes=available // config.ranks or None,  # all on this host
        )

    def load(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        sizing: Sizing,
        config: EngineConfig,
        release: Callable[[Tensor], None],
        ranks: Ranks | None = None,
    ) -> tuple[Runner, None]:
        sizes = sizing.sizes
        runner = ReferenceRunner(
            spec,
            weights,
            total_blocks=sizing.total_blocks,
            block_tokens=sizes.block_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=sizes.max_sequences,
            context_tokens=sizing.context_tokens,
            steps_in_flight=2 if sizes.overlap else 1,
            ranks=ranks,
        )
        return runner, None

    def join(self, config: EngineConfig, rank: int, meeting: Path) -> Ranks:
        from headrace.parallel.gloo import GlooRanks

        return GlooRanks(rank, config.tensor_parallel, meeting, stages=config.pipeline_parallel)

    def facts(self, config: EngineConfig) -> dict[str, str]:
        ranks = config.ranks
        path = "numpy" if ranks == 1 else f"numpy, {ranks} ranks"
        if config.pipeline_parallel > 1:
            path += f" in {config.pipeline_parallel} stages"
        return {"name": self.name.value, "path": path, "kv_dtype": KvDtype.F32.value}


def _values(weights: DecoderWeights[Weight]) -> int:
    """In memory: a tied head is the embedding again."""
    found: dict[int, int] = {}

    def count(role: str, weight: Weight) -> None:
        found[id(weight)] = sum(part.values for part in (*weight.parts, *weight.bias))

    weights.map(count)
    return sum(found.values())
