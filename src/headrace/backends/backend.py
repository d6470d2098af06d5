"""The interface of a backend to the rest of the program: one object with these methods.

Each backend has one in its `backend.py`; `backends/registry.py` finds it by name. Importing such a
file is cheap: heavy packages (torch) are imported by the methods that need them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.config import Device, EngineConfig, StepSizes
from headrace.core.ranks import Ranks
from headrace.core.step import Runner
from headrace.models.decoder import DecoderWeights
from headrace.models.spec import ModelSpec
from headrace.plan.ledger import Allocated
from headrace.plan.sizing import Footprint, Sizing
from headrace.weights.tensor import Tensor
from headrace.weights.weight import Weight


class Backend(Protocol):
    @property
    def name(self) -> Device:
        """The value of `--device` that selects it."""
        ...

    @property
    def defaults(self) -> StepSizes:
        """The sizes to use where the settings leave them open."""
        ...

    def check(self, config: EngineConfig) -> None:
        """Raises DeviceError if this machine can't run the backend, and another ConfigError if the
        backend does not support a setting. Looks at no model."""
        ...

    def footprint(
        self, spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
    ) -> Footprint:
        """How much memory a model would take, and how much there is. Loads no weight."""
        ...

    def load(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        sizing: Sizing,
        config: EngineConfig,
        release: Callable[[Tensor], None],
        ranks: Ranks | None = None,
    ) -> tuple[Runner, Allocated | None]:
        """The model ready to compute, and the memory it took (None: this backend does not measure
        it). `release` is called with each tensor of the file that is no longer needed. With
        `ranks`, the model is this rank's share."""
        ...

    def join(self, config: EngineConfig, rank: int, meeting: str) -> Ranks:
        """Meets the other ranks of `config.tensor_parallel`, which do the same at this time, over
        a file that none of them has made yet (see parallel/)."""
        ...

    def facts(self, config: EngineConfig) -> dict[str, str]:
        """What the exact bits of answers depend on besides the model: at least `name`, `path` (the
        kernels) and `kv_dtype`. Part of the fingerprint."""
        ...
