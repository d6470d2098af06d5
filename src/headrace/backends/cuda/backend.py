"""The CUDA backend as the rest of the program sees it: what it needs, what it takes, its runner.

torch takes seconds to import, so the methods that need it import it; importing this file does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from headrace.backends.cuda import device, layout
from headrace.backends.cuda.kv_sizes import kv_bytes_per_token
from headrace.core.config import Device, EngineConfig, GraphMode, KvDtype, StepSizes
from headrace.core.errors import DeviceError
from headrace.core.ranks import Ranks
from headrace.core.step import Runner
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Allocated
from headrace.plan.sizing import Footprint, Sizing
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight


class CudaBackend:
    name = Device.CUDA
    # Several thousand rows keep a GPU's matrix units busy, hence max_batch_tokens; max_sequences is
    # as far as larger batches still gain. The block size suits the attention tiles.
    defaults = StepSizes(
        max_batch_tokens=8192,
        max_sequences=512,
        block_tokens=64,
        kv_dtype=KvDtype.BF16,
        overlap=True,
        max_step_growth=24.0,  # a step that only decodes leaves most of the matrix units idle
    )

    def check(self, config: EngineConfig) -> None:
        """With `--device auto` torch is only imported if there is a driver: the user may not have
        meant a GPU."""
        if config.device is Device.AUTO and not device.driver_is_present():
            raise DeviceError("There is no NVIDIA driver.", "Set --device cpu.", param="device")
        gpu = device.find_gpu()
        layout.check_sizes(config.sizes(self.defaults))
        device.budget_bytes(gpu, config.gpu_memory)
        if config.ranks > 1:
            device.check_ranks(config.ranks)

    def footprint(
        self, spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
    ) -> Footprint:
        gpu = device.find_gpu()
        sizes = config.sizes(self.defaults)
        shapes = layout.shape_weights(weights, config.quantization)
        layout.check_fp8(gpu, shapes, sizes.kv_dtype)
        return Footprint(
            spec=spec,
            sizes=sizes,
            weight_bytes=layout.weight_bytes(shapes),
            kv_dtype=sizes.kv_dtype,
            kv_bytes_per_token=kv_bytes_per_token(spec, sizes.kv_dtype),
            activation_bytes=partial(
                layout.StepMemory.of(spec, shapes).bytes,
                sizes,
                gpu.multiprocessors,
                batch_invariant=config.batch_invariant,
            ),
            available_bytes=device.budget_bytes(gpu, config.gpu_memory),
            graphs_bytes=layout.graph_bytes(
                spec,
                config.graphs,
                sizes.max_batch_tokens,
                has_drafts=_draft_tokens(config, self.defaults) > 0,
            ),
            runtime_bytes=layout.scratch_bytes(spec, sizes.max_sequences),
            kv_fraction=1.0,  # nothing else uses what is left of the budget
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
        from headrace.backends.cuda.runner import CudaRunner

        sizes = sizing.sizes
        runner = CudaRunner(
            spec,
            weights,
            total_blocks=sizing.total_blocks,
            block_tokens=sizes.block_tokens,
            max_batch_tokens=sizes.max_batch_tokens,
            max_sequences=sizes.max_sequences,
            context_tokens=sizing.context_tokens,
            kv_dtype=sizes.kv_dtype,
            quantization=config.quantization,
            overlap=sizes.overlap,
            graphs=GraphMode.OFF if ranks and device.ranks_share_a_gpu() else config.graphs,
            batch_invariant=config.batch_invariant,
            dependent=True,
            release=release,
            ranks=ranks,
            draft_tokens=_draft_tokens(config, self.defaults),
        )
        return runner, Allocated(
            weights_bytes=runner.weight_bytes,
            kv_pool_bytes=runner.kv_bytes,
            activations_bytes=runner.activation_bytes,
            graphs_bytes=runner.graph_bytes,
        )

    def join(self, config: EngineConfig, rank: int, meeting: Path) -> Ranks:
        if device.ranks_share_a_gpu():  # NCCL refuses that
            from headrace.parallel.gloo import GlooRanks

            return GlooRanks(rank, config.tensor_parallel, meeting, stages=config.pipeline_parallel)
        from headrace.parallel.nccl import NcclRanks

        return NcclRanks(
            rank,
            config.tensor_parallel,
            meeting,
            stages=config.pipeline_parallel,
            ordered=config.batch_invariant,
        )

    def facts(self, config: EngineConfig) -> dict[str, str]:
        """Includes the GPU and the compiler's version: the choice of kernels depends on the first,
        their code on the second."""
        gpu, ranks = device.find_gpu(), config.ranks
        return {
            "name": self.name.value,
            "path": "triton",
            "kv_dtype": config.sizes(self.defaults).kv_dtype.value,
            "gpu": gpu.name if ranks == 1 else f"{ranks} x {gpu.name}",
            **{name: found for name, found in device.library_versions().items() if found},
        }


def _draft_tokens(config: EngineConfig, defaults: StepSizes) -> int:
    return 0 if config.sizes(defaults).speculate == "off" else config.max_draft_tokens
