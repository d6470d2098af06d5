"""What a backend is to the rest of the program: one object with these methods.

Each backend has one, in its `backend.py`; `backends/registry.py` finds it by its name. Importing
such a file is cheap: what is heavy (torch) is imported by the methods that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headrace.core.config import Device, EngineConfig, StepSizes
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
        """As `--device` has it."""
        ...

    @property
    def defaults(self) -> StepSizes:
        """Where the settings leave these open."""
        ...

    def check(self, config: EngineConfig) -> None:
        """Raises DeviceError if this machine can't run the backend, and another ConfigError if the
        backend does not have what a setting asks for. Looks at no model."""
        ...

    def footprint(
        self, spec: ModelSpec, weights: DecoderWeights[Weight], config: EngineConfig
    ) -> Footprint:
        """What a model would take, and how much memory there is. Loads no weight."""
        ...

    def load(
        self,
        spec: ModelSpec,
        weights: DecoderWeights[Weight],
        sizing: Sizing,
        config: EngineConfig,
        release: Callable[[Tensor], None],
    ) -> tuple[Runner, Allocated | None]:
        """The model ready to compute, and what it took; None: this backend does not count.
        `release` is told of each tensor of the file that is no longer needed."""
        ...

    def facts(self, config: EngineConfig) -> dict[str, str]:
        """What the bits of its answers depend on, beside the model: at least `name`, `path` (the
        kernels) and `kv_dtype`. Part of the fingerprint."""
        ...
