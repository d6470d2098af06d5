"""The CPU backend as the rest of the program sees it: what it needs, what it takes, its runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.backends.cpu import _native, layout
from headrace.backends.cpu.kv import check_kv_dtype, kv_bytes_per_token
from headrace.backends.cpu.machine import choose_threads
from headrace.backends.cpu.runner import BLOCK_TOKENS, CpuRunner
from headrace.backends.shared import host
from headrace.core.config import Device, EngineConfig, KvDtype, Quantization, StepSizes
from headrace.core.errors import ConfigError
from headrace.core.ranks import Ranks
from headrace.core.step import Runner
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Allocated
from headrace.plan.sizing import Footprint, Sizing
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight

logger = logging.getLogger("headrace")


class CpuBackend:
    name = Device.CPU
    defaults = StepSizes(
        max_batch_tokens=512,
        max_sequences=64,
        block_tokens=BLOCK_TOKENS,
        kv_dtype=KvDtype.F16,
        overlap=False,
        max_step_growth=2.0,
        speculate="auto",  # docs/decisions/0017-guesses-by-time.md has the figures
    )

    def check(self, config: EngineConfig) -> None:
        """Runs on every machine that the native module was built for."""
        sizes = config.sizes(self.defaults)
        if sizes.block_tokens != BLOCK_TOKENS:
            raise ConfigError(
                f"block_tokens is {sizes.block_tokens}; the CPU backend supports only "
                f"{BLOCK_TOKENS}.",
                f"Set block_tokens to {BLOCK_TOKENS}.",
                param="block_tokens",
            )
        if config.quantization is not Quantization.NONE:
            raise ConfigError(
                f"quantization is {config.quantization.value!r}; the CPU backend does not quantize "
                "weights while loading them.",
                "Use a GGUF file in a quantized format, or set --device cuda.",
                param="quantization",
            )
        check_kv_dtype(sizes.kv_dtype)
        if config.ranks > 1:
            name = "tensor_parallel" if config.tensor_parallel > 1 else "pipeline_parallel"
            raise ConfigError(
                f"{name} is {getattr(config, name)}; the CPU backend computes a model in one "
                "process, whose threads share the work.",
                "Leave it out and set --threads, or set --device reference to try it.",
                param=name,
            )

    def footprint(
        self, spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
    ) -> Footprint:
        sizes = config.sizes(self.defaults)
        threads, _ = choose_threads(config.threads)
        available = host.free_bytes(config.memory_share)
        return Footprint(
            spec=spec,
            sizes=sizes,
            weight_bytes=layout.weight_bytes(weights),
            kv_dtype=sizes.kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token(spec, sizes.kv_dtype),
            activation_bytes=partial(layout.activation_bytes, spec, weights, threads),
            available_bytes=available or None,
        )

    def load(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        sizing: Sizing,
        config: EngineConfig,
        release: Callable[[Tensor], None],
        ranks: Ranks | None = None,
    ) -> tuple[Runner, Allocated]:
        threads, why = choose_threads(config.threads)
        if config.threads is not None and threads < config.threads:
            logger.warning("computing with %d threads: %s", threads, why)
        sizes = sizing.sizes
        runner = CpuRunner(
            spec,
            weights,
            total_blocks=sizing.total_blocks,
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=sizes.max_sequences,
            context_tokens=sizing.context_tokens,
            threads=threads,
            kv_dtype=sizes.kv_dtype,
            overlap=sizes.overlap,
            release=release,
        )
        return runner, Allocated(
            weights_bytes=runner.weight_bytes,
            kv_pool_bytes=runner.kv_bytes,
            activations_bytes=runner.activation_bytes,
        )

    def join(self, config: EngineConfig, rank: int, meeting: Path) -> Ranks:
        raise AssertionError("refused by check()")

    def facts(self, config: EngineConfig) -> dict[str, str]:
        return {
            "name": self.name.value,
            "path": str(_native.paths()[0]),
            "kv_dtype": config.sizes(self.defaults).kv_dtype.value,
        }
